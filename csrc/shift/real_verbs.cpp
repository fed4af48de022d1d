#include "shift/real_verbs.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace resilient::shift {
namespace {

// RTLD_NEXT would find nothing in a program that has opened this library
// itself, as NCCL does. dlsym without a version may find the twin of 2006 with
// another layout.
template <typename Function>
void findIfThere(Function*& function, const char* name, const char* version) {
  static void* const library = dlopen("libibverbs.so.1", RTLD_LAZY);
  void* symbol = library == nullptr ? nullptr : dlvsym(library, name, version);
  function = reinterpret_cast<Function*>(symbol);
}

template <typename Function>
void find(
    Function*& function,
    const char* name,
    const char* version = "IBVERBS_1.1") {
  findIfThere(function, name, version);
  if (function == nullptr) {
    std::fprintf(
        stderr,
        "torch-resilient shift: libibverbs has no %s@%s\n",
        name,
        version);
    std::abort();
  }
}

RealVerbs load() {
  RealVerbs found{};
  find(found.openDevice, "ibv_open_device");
  find(found.closeDevice, "ibv_close_device");
  find(found.allocPd, "ibv_alloc_pd");
  find(found.deallocPd, "ibv_dealloc_pd");
  find(found.regMr, "ibv_reg_mr");
  find(found.regMrIova, "ibv_reg_mr_iova", "IBVERBS_1.7");
  find(found.regMrIova2, "ibv_reg_mr_iova2", "IBVERBS_1.8");
  findIfThere(found.regDmabufMr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  find(found.deregMr, "ibv_dereg_mr");
  find(found.createChannel, "ibv_create_comp_channel", "IBVERBS_1.0");
  find(found.destroyChannel, "ibv_destroy_comp_channel", "IBVERBS_1.0");
  find(found.createCq, "ibv_create_cq");
  find(found.destroyCq, "ibv_destroy_cq");
  find(found.getCqEvent, "ibv_get_cq_event");
  find(found.ackCqEvents, "ibv_ack_cq_events");
  find(found.createQp, "ibv_create_qp");
  find(found.modifyQp, "ibv_modify_qp");
  find(found.queryQp, "ibv_query_qp");
  find(found.destroyQp, "ibv_destroy_qp");
  return found;
}

} // namespace

const RealVerbs& real() {
  static const RealVerbs found = load();
  return found;
}

} // namespace resilient::shift
