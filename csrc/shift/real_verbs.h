#pragma once

#include <infiniband/verbs.h>

namespace resilient::shift {

// The functions of libibverbs that this library replaces, by their versions.
struct RealVerbs {
  ibv_context* (*openDevice)(ibv_device*);
  int (*closeDevice)(ibv_context*);
  ibv_pd* (*allocPd)(ibv_context*);
  int (*deallocPd)(ibv_pd*);
  ibv_mr* (*regMr)(ibv_pd*, void*, size_t, int);
  ibv_mr* (*regMrIova)(ibv_pd*, void*, size_t, uint64_t, int);
  ibv_mr* (*regMrIova2)(ibv_pd*, void*, size_t, uint64_t, unsigned);
  // Null in a libibverbs before 34.
  ibv_mr* (*regDmabufMr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);
  int (*deregMr)(ibv_mr*);
  ibv_comp_channel* (*createChannel)(ibv_context*);
  int (*destroyChannel)(ibv_comp_channel*);
  ibv_cq* (*createCq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  int (*destroyCq)(ibv_cq*);
  int (*getCqEvent)(ibv_comp_channel*, ibv_cq**, void**);
  void (*ackCqEvents)(ibv_cq*, unsigned);
  ibv_qp* (*createQp)(ibv_pd*, ibv_qp_init_attr*);
  int (*modifyQp)(ibv_qp*, ibv_qp_attr*, int);
  int (*queryQp)(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*);
  int (*destroyQp)(ibv_qp*);
};

// Ends the process with a message if libibverbs lacks one of the others.
const RealVerbs& real();

} // namespace resilient::shift
