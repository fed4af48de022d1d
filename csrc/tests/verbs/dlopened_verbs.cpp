// libibverbs for a program that is not linked to it: the file that
// NCCL_IBVERBS_LIB names is opened, and functions are looked up in it by name
// and version, as NCCL does.

#include <dlfcn.h>
#include <infiniband/verbs.h>

#include <cstdio>
#include <cstdlib>

#undef ibv_reg_mr

namespace {

void* find(const char* name, const char* version) {
  static void* const library = [] {
    const char* file = std::getenv("NCCL_IBVERBS_LIB");
    return dlopen(file == nullptr ? "libibverbs.so.1" : file, RTLD_NOW);
  }();
  void* found = library == nullptr ? nullptr : dlvsym(library, name, version);
  if (found == nullptr) {
    std::printf("broken no %s@%s: %s\n", name, version, dlerror());
    std::exit(1);
  }
  return found;
}

} // namespace

#define FORWARD(Result, name, version, parameters, arguments) \
  extern "C" Result name parameters {                         \
    using Function = Result(*) parameters;                    \
    static const auto function =                              \
        reinterpret_cast<Function>(find(#name, version));     \
    return function arguments;                                \
  }

#define V1 "IBVERBS_1.1"

FORWARD(ibv_device**, ibv_get_device_list, V1, (int* count), (count))
FORWARD(void, ibv_free_device_list, V1, (ibv_device * *list), (list))
FORWARD(const char*, ibv_get_device_name, V1, (ibv_device * device), (device))
FORWARD(ibv_context*, ibv_open_device, V1, (ibv_device * device), (device))
FORWARD(int, ibv_close_device, V1, (ibv_context * context), (context))
FORWARD(
    int,
    ibv_query_gid,
    V1,
    (ibv_context * context, uint8_t port, int index, ibv_gid* gid),
    (context, port, index, gid))
FORWARD(ibv_pd*, ibv_alloc_pd, V1, (ibv_context * context), (context))
FORWARD(int, ibv_dealloc_pd, V1, (ibv_pd * pd), (pd))
FORWARD(
    ibv_mr*,
    ibv_reg_mr,
    V1,
    (ibv_pd * pd, void* address, size_t length, int access),
    (pd, address, length, access))
FORWARD(
    ibv_mr*,
    ibv_reg_mr_iova2,
    "IBVERBS_1.8",
    (ibv_pd * pd, void* address, size_t length, uint64_t iova, unsigned access),
    (pd, address, length, iova, access))
FORWARD(int, ibv_dereg_mr, V1, (ibv_mr * mr), (mr))
FORWARD(
    ibv_comp_channel*,
    ibv_create_comp_channel,
    "IBVERBS_1.0",
    (ibv_context * context),
    (context))
FORWARD(
    int,
    ibv_destroy_comp_channel,
    "IBVERBS_1.0",
    (ibv_comp_channel * channel),
    (channel))
FORWARD(
    ibv_cq*,
    ibv_create_cq,
    V1,
    (ibv_context * context,
     int count,
     void* own,
     ibv_comp_channel* channel,
     int vector),
    (context, count, own, channel, vector))
FORWARD(int, ibv_destroy_cq, V1, (ibv_cq * cq), (cq))
FORWARD(
    int,
    ibv_get_cq_event,
    V1,
    (ibv_comp_channel * channel, ibv_cq** cq, void** own),
    (channel, cq, own))
FORWARD(void, ibv_ack_cq_events, V1, (ibv_cq * cq, unsigned count), (cq, count))
FORWARD(
    ibv_qp*,
    ibv_create_qp,
    V1,
    (ibv_pd * pd, ibv_qp_init_attr* wanted),
    (pd, wanted))
FORWARD(
    int,
    ibv_modify_qp,
    V1,
    (ibv_qp * qp, ibv_qp_attr* wanted, int mask),
    (qp, wanted, mask))
FORWARD(int, ibv_destroy_qp, V1, (ibv_qp * qp), (qp))
FORWARD(const char*, ibv_wc_status_str, V1, (ibv_wc_status status), (status))
