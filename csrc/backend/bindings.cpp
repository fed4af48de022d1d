// The Python module torch_resilient._C.
//
// Every binding that enters the engine releases the GIL first: such a call may
// wait for the loop, and a callback of a future that needs the GIL must be able
// to run meanwhile. Results are converted to Python afterwards, with the GIL.
// torch_resilient/_C.pyi lists the signatures.

#include <torch/csrc/utils/pybind.h>

#include <net/if.h>
#include <unistd.h>

#include <algorithm>

#include "backend/call_order.h"
#include "backend/errors.h"
#include "backend/fork_check.h"
#include "backend/future_threads.h"
#include "backend/process_end.h"
#include "backend/process_group.h"
#include "backend/staging_thread.h"
#include "backend/traffic_choice.h"
#include "base/log.h"
#include "delegate/authenticated_store.h"
#include "delegate/engine_control.h"
#include "transport/gpu_way.h"
#include "transport/verbs_api.h"

namespace py = pybind11;

// Drops a reference without the GIL: the destructor of a group waits for
// threads, and one of them may be running a Python callback. The Python object
// must be destroyed all the same when no GIL is held.
template <typename T>
class NoGil {
 public:
  NoGil() = default;
  explicit NoGil(T* raw)
      : p_(c10::intrusive_ptr<T>::unsafe_steal_from_new(raw)) {}
  // NOLINTNEXTLINE: pybind11 converts implicitly
  NoGil(c10::intrusive_ptr<T> p) : p_(std::move(p)) {}
  NoGil(const NoGil&) = default;
  NoGil(NoGil&&) noexcept = default;
  NoGil& operator=(const NoGil&) = default;
  NoGil& operator=(NoGil&&) noexcept = default;
  ~NoGil() {
    if (p_ && PyGILState_Check()) {
      py::gil_scoped_release release;
      p_.reset();
    }
  }
  T* get() const {
    return p_.get();
  }
  T* operator->() const {
    return p_.get();
  }
  T& operator*() const {
    return *p_;
  }
  explicit operator bool() const {
    return static_cast<bool>(p_);
  }

 private:
  c10::intrusive_ptr<T> p_;
};

PYBIND11_DECLARE_HOLDER_TYPE(T, NoGil<T>, true)

namespace resilient {

namespace {

constexpr auto kExitLimit = std::chrono::seconds(1);

// Lets Ctrl-C end a wait. Python handles signals on its main thread alone
// (the process's, unless Python is embedded), so the others need not fight
// for the GIL.
// Waiting threads call it (setInterruptHook). Its exception leaves wait() and
// waitAny() and reaches Python as KeyboardInterrupt, or as the error of the
// program's own signal handler.
void checkSignals() {
  if (gettid() != getpid() || Py_IsInitialized() == 0) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

// Called when the interpreter, or a process of multiprocessing, begins to end
// (torch_resilient/_process_end.py). Afterwards none of our threads touches
// Python. Call without the GIL.
//
// The engine ends first: it fails all pending operations, and their ends are
// the last tasks that it gives to the staging and completion threads. Each step
// gets the time that the earlier ones left of kExitLimit; a thread that does
// not end in time is left to the end of the process.
void endProcess() {
  sleepInsteadOfUnwinding();
  const auto start = std::chrono::steady_clock::now();
  const auto left = [&] {
    return std::max<Nanos>(
        kExitLimit - (std::chrono::steady_clock::now() - start), Nanos(0));
  };
  shutdownEngineAtExit(left());
  StagingThread::stop(left());
  FutureThreads::stop(left());
}

// Not by py::register_exception(): its types have one base.
void bindCallError(py::module_& m) {
  static PyObject* type = nullptr; // lives for ever
  const auto bases = py::make_tuple(
      py::handle(PyExc_ValueError), py::handle(PyExc_RuntimeError));
  type = PyErr_NewExceptionWithDoc(
      "torch_resilient._C.CallError",
      "The arguments of an operation cannot be used; nothing was sent. A "
      "RuntimeError as with gloo, and a ValueError as with NCCL.",
      bases.ptr(),
      nullptr);
  if (type == nullptr) {
    throw py::error_already_set();
  }
  m.add_object("CallError", py::reinterpret_borrow<py::object>(type));
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(std::move(error));
      }
    } catch (const CallError& e) {
      PyErr_SetString(type, e.what_without_backtrace());
    }
  });
}

// Turns the core's exceptions into those that torch's translators know.
template <typename F>
auto translated(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const StatusError& e) {
    throwStatus(e.status());
  }
}

// Types are checked here; bounds and choices by the table's own rules.
// `engine` changes only if all checks pass. A bool is an int in Python and is
// refused as a number: Options(linger_s=True) is a mistake.
void setOption(
    EngineOptions& engine,
    const OptionInfo& option,
    const py::handle& value) {
  EngineOptions changed = engine;
  const auto mismatch = [&](const char* expected) {
    throw py::type_error(
        option.name + ": expected " + expected + ", got " +
        std::string(py::str(py::type::of(value).attr("__name__"))));
  };
  std::visit(
      [&](auto member) {
        auto& field = changed.*member;
        using T = std::remove_reference_t<decltype(field)>;
        if constexpr (std::is_same_v<T, std::string>) {
          if (!py::isinstance<py::str>(value)) {
            mismatch("a string");
          }
          translated([&] {
            changed.setFromString(option.name, value.cast<std::string>());
          });
        } else if constexpr (std::is_same_v<T, bool>) {
          if (!py::isinstance<py::bool_>(value)) {
            mismatch("True or False");
          }
          field = value.cast<bool>();
        } else if constexpr (std::is_same_v<T, double>) {
          if (py::isinstance<py::bool_>(value) ||
              !(py::isinstance<py::float_>(value) ||
                py::isinstance<py::int_>(value))) {
            mismatch("a number of seconds");
          }
          field = value.cast<double>();
        } else {
          if (py::isinstance<py::str>(value) &&
              (option.kind == OptionKind::Bytes ||
               option.kind == OptionKind::AutoCount)) {
            translated([&] { // "64M" or "auto", as in the environment
              changed.setFromString(option.name, value.cast<std::string>());
            });
          } else if (
              py::isinstance<py::bool_>(value) ||
              !py::isinstance<py::int_>(value)) {
            mismatch("a whole number");
          } else {
            field = value.cast<int64_t>();
          }
        }
      },
      option.member);
  // Bounds of this field only: relations between fields are checked when the
  // options are used, or they could not be changed one at a time.
  translated([&] {
    if (option.kind == OptionKind::Bytes || option.kind == OptionKind::Count ||
        option.kind == OptionKind::AutoCount ||
        option.kind == OptionKind::Seconds) {
      EngineOptions probe;
      probe.setFromString(option.name, changed.getAsString(option.name));
    }
  });
  engine = std::move(changed);
}

py::object getOption(const EngineOptions& engine, const OptionInfo& option) {
  return std::visit(
      [&](auto member) -> py::object { return py::cast(engine.*member); },
      option.member);
}

std::string repr(const GroupOptions& options) {
  std::string text = "Options(timeout=" +
      std::to_string(static_cast<double>(options.timeout.count()) / 1000.0) +
      "s";
  for (const OptionInfo& option : optionTable()) {
    const std::string value = options.engine.getAsString(option.name);
    if (value != option.defaultText) { // a secret reads "(set)"
      text += ", " + option.name + "=" + value;
    }
  }
  return text + ")";
}

// The table with its texts, for the Python tools. The names are in the order of
// OptionKind.
py::list optionTableForPython() {
  static constexpr const char* kKinds[] = {
      "Bytes",
      "Count",
      "AutoCount",
      "Seconds",
      "Flag",
      "Text",
      "Choice",
      "Secret"};
  const EngineOptions defaults;
  py::list rows;
  for (const OptionInfo& option : optionTable()) {
    py::dict row;
    row["kind"] = kKinds[static_cast<size_t>(option.kind)];
    row["name"] = option.name;
    row["variable"] = option.variable;
    row["default"] = getOption(defaults, option);
    row["min"] = option.min;
    row["max"] = option.max;
    row["unit"] = option.unit;
    row["doc"] = option.doc;
    rows.append(std::move(row));
  }
  return rows;
}

py::dict toPython(const DatagramStats& s) {
  py::dict d;
  d["packet_bytes"] = s.packetBytes;
  d["packets"] = s.packets;
  d["bytes"] = s.bytes;
  d["parity"] = s.parity;
  d["retransmitted"] = s.retransmitted;
  d["dropped"] = s.lost;
  d["drop_rate"] = s.lossRate;
  d["burst_packets"] = s.burstPackets;
  d["pace_bytes_per_s"] = s.paceBytesPerS;
  d["carries_up_to_bytes"] = s.carriesUpTo;
  d["recovered"] = s.recovered;
  d["zero_filled"] = s.zeroFilled;
  d["duplicates"] = s.duplicates;
  d["forged"] = s.forged;
  return d;
}

py::dict toPython(const VerbsStats& s) {
  py::dict d;
  d["device"] = s.device;
  d["remote_device"] = s.remoteDevice;
  d["port"] = s.port;
  d["queue_pair"] = s.queuePair;
  d["mtu_bytes"] = s.mtuBytes;
  d["completed"] = s.completed;
  d["failed"] = s.failed;
  d["sends"] = s.sends;
  d["receives"] = s.receives;
  d["reads"] = s.reads;
  d["copied_bytes"] = s.copiedBytes;
  d["read_bytes"] = s.readBytes;
  d["placed_bytes"] = s.placedBytes;
  return d;
}

// For the doctor, which looks without an engine.
py::tuple rdmaPorts() {
  std::string why;
  std::vector<VerbsPort> ports;
  if (VerbsApi* const api = systemVerbs(why); api != nullptr) {
    why = api->ports(ports).message();
  }
  py::list list;
  for (const VerbsPort& port : ports) {
    char nic[IF_NAMESIZE] = "";
    ::if_indextoname(port.interfaceIndex, nic);
    py::dict d;
    d["device"] = port.device;
    d["port"] = int{port.port};
    d["gid_index"] = port.gidIndex;
    d["gid"] = py::bytes(
        reinterpret_cast<const char*>(port.gid.data()), port.gid.size());
    d["nic"] = std::string(nic);
    d["mtu_bytes"] = port.mtuBytes;
    d["active"] = port.active;
    list.append(std::move(d));
  }
  return py::make_tuple(list, why);
}

// For the doctor: how an RDMA device can register the memory of a GPU, tried
// with the memory at this address, and why not better.
py::tuple rdmaGpuWay(const std::string& device, int gpu, uintptr_t address) {
  GpuRegistration made;
  std::shared_ptr<VerbsDevice> opened;
  if (VerbsApi* const api = systemVerbs(made.why); api != nullptr) {
    const py::gil_scoped_release release;
    if (const Status status = api->open(device, opened); !status.ok()) {
      made.why = status.message();
    } else {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): from a tensor
      const auto* const at = reinterpret_cast<const std::byte*>(address);
      made = registerGpuMemory(gpuSystem(), *opened, {gpu, at}, 1);
    }
  }
  return py::make_tuple(nameOf(made.way), made.why);
}

py::dict toPython(const PathStats& s) {
  py::dict d;
  d["kind"] = nameOf(s.kind);
  d["index"] = s.index;
  d["state"] = s.state;
  d["local_address"] = s.localAddress;
  d["remote_address"] = s.remoteAddress;
  d["encrypted"] = s.encrypted;
  d["cipher"] = s.cipher;
  d["forward_secret"] = s.forwardSecret;
  d["bytes_sent"] = s.bytesSent;
  d["bytes_received"] = s.bytesReceived;
  d["chunks_sent"] = s.chunksSent;
  d["chunks_retransmitted"] = s.chunksRetransmitted;
  d["round_trip_s"] = s.roundTripS;
  d["round_trip_min_s"] = s.minRoundTripS;
  d["round_trips"] = s.roundTripsS.count();
  d["round_trips_s"] = s.roundTripsS.last();
  d["goodput_bytes_per_s"] = s.goodputBytesPerS;
  d["capacity_bytes_per_s"] = s.capacityBytesPerS;
  d["nic"] = s.nic;
  d["remote_nic"] = s.remoteNic;
  d["times_suspect"] = s.timesSuspect;
  d["reconnects"] = s.reconnects;
  d["last_error"] = s.lastError;
  d["datagrams"] =
      s.datagrams ? py::object(toPython(*s.datagrams)) : py::object(py::none());
  d["relay"] = py::none();
  if (s.relay) {
    py::dict relay;
    relay["rank"] = s.relay->rank;
    relay["host"] = s.relay->host;
    relay["ours"] = s.relay->ours;
    relay["window_bytes"] = s.relay->windowBytes;
    d["relay"] = std::move(relay);
  }
  d["rdma"] = s.verbs ? py::object(toPython(*s.verbs)) : py::object(py::none());
  return d;
}

py::dict toPython(const PeerStats& s) {
  py::dict d;
  d["rank"] = s.rank;
  d["host"] = s.host;
  d["state"] = s.state;
  d["messages_sent"] = s.messagesSent;
  d["messages_received"] = s.messagesReceived;
  d["bytes_sent"] = s.bytesSent;
  d["bytes_received"] = s.bytesReceived;
  d["deliveries"] = s.deliveriesS.count();
  d["deliveries_s"] = s.deliveriesS.last();
  d["last_heard_seconds_ago"] = s.lastHeardSecondsAgo < 0
      ? py::object(py::none())
      : py::object(py::float_(s.lastHeardSecondsAgo));
  d["last_error"] = s.lastError;
  py::list paths;
  for (const PathStats& path : s.paths) {
    paths.append(toPython(path));
  }
  d["paths"] = std::move(paths);
  return d;
}

py::dict toPython(const GroupStats& s) {
  py::dict d;
  d["group"] = s.group;
  d["rank"] = s.rank;
  d["size"] = s.size;
  d["collectives"] = s.collectives;
  d["operations_pending"] = s.operationsPending;
  py::list peers;
  for (const PeerStats& peer : s.peers) {
    peers.append(toPython(peer));
  }
  d["peers"] = std::move(peers);
  py::dict listener;
  listener["accepted"] = s.listener.accepted;
  listener["admitted"] = s.listener.admitted;
  listener["refused"] = s.listener.refused;
  listener["timed_out"] = s.listener.timedOut;
  listener["broken_off"] = s.listener.brokenOff;
  listener["dropped"] = s.listener.dropped;
  listener["pending"] = s.listener.pending;
  d["listener"] = std::move(listener);
  py::dict relay;
  relay["flows"] = s.relay.flows;
  relay["messages"] = s.relay.messages;
  relay["bytes"] = s.relay.bytes;
  relay["held_bytes"] = s.relay.heldBytes;
  relay["held_max_bytes"] = s.relay.heldMaxBytes;
  relay["refused"] = s.relay.refused;
  d["relay"] = std::move(relay);
  py::dict trust;
  trust["encryption"] = s.trust.encryption;
  trust["own_secret"] = s.trust.ownSecret;
  trust["certificates"] = s.trust.certificates;
  trust["encrypted"] = s.trust.handshakes.encrypted;
  trust["plaintext"] = s.trust.handshakes.plaintext;
  py::dict faults;
  for (size_t i = 0; i < kTrustFaults; ++i) {
    faults[kTrustFaultNames[i]] = s.trust.handshakes.faults[i];
  }
  trust["faults"] = std::move(faults);
  d["trust"] = std::move(trust);
  return d;
}

// Called by torch.distributed through the registered Python function.
// torch's arguments determine the timeout, name and ranks of the group; `given`
// only adds a description and, for the group that starts the engine, its
// settings.
c10::intrusive_ptr<ProcessGroupResilient> create(
    const c10d::DistributedBackendOptions& dist,
    const c10::intrusive_ptr<GroupOptions>& given) {
  return translated([&] {
    auto options =
        c10::make_intrusive<GroupOptions>(processEngineOptions(given.get()));
    options->timeout =
        std::chrono::duration_cast<std::chrono::milliseconds>(dist.timeout);
    options->group_name = dist.group_id;
    if (given) {
      options->group_desc = given->group_desc;
    }
    for (const int64_t rank : dist.global_ranks_in_group) {
      options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
    }
    return c10::make_intrusive<ProcessGroupResilient>(
        dist.store, dist.group_rank, dist.group_size, std::move(options));
  });
}

// Returns the previous choice of this thread, -1 for none, for a later call
// that restores it.
int setTrafficClass(int value) {
  const int before =
      chosenTrafficClass ? static_cast<int>(*chosenTrafficClass) : -1;
  if (value == -1) {
    chosenTrafficClass.reset();
  } else if (value >= 0 && value < static_cast<int>(kTrafficClassCount)) {
    chosenTrafficClass = static_cast<TrafficClass>(value);
  } else {
    throw py::value_error(
        "traffic class " + std::to_string(value) +
        ": expected -1 (default), "
        "0 activation, 1 activation_gradient, 2 gradient or 3 bulk");
  }
  return before;
}

void bindOptions(py::module_& m) {
  auto options = py::class_<
      GroupOptions,
      c10::intrusive_ptr<GroupOptions>,
      c10d::Backend::Options>(
      m,
      "Options",
      "Settings of a group: `timeout`, and those of the process's engine. "
      "Without arguments they come from TORCH_RESILIENT_* variables. The "
      "first group's engine settings hold for all groups of the process.");
  options.def(py::init([](const py::kwargs& values) {
    auto made = translated([] { return c10::make_intrusive<GroupOptions>(); });
    auto object = py::cast(made);
    for (const auto& [name, value] : values) {
      if (!py::hasattr(object, name)) {
        throw py::type_error(noSuchOption(name.cast<std::string>()));
      }
      py::setattr(object, name, value);
    }
    return made;
  }));
  for (const OptionInfo& row : optionTable()) {
    const OptionInfo* option = &row; // the table lives for ever
    const std::string doc = row.doc + " (" + row.unit + ")";
    options.def_property(
        row.name.c_str(),
        [option](const GroupOptions& self) {
          return getOption(self.engine, *option);
        },
        [option](GroupOptions& self, const py::object& value) {
          setOption(self.engine, *option, value);
        },
        doc.c_str());
  }
  const auto copy = [](const GroupOptions& self) {
    return c10::make_intrusive<GroupOptions>(self);
  };
  options.def("__copy__", copy);
  options.def(
      "__deepcopy__",
      [copy](const GroupOptions& self, const py::dict&) { return copy(self); },
      py::arg("memo"));
  options.def("__repr__", &repr);
  options.def(
      "validate",
      [](const GroupOptions& self) {
        translated([&] { self.engine.validate(); });
      },
      "Checks the settings against each other; ValueError tells what is "
      "wrong.");
}

void bindGroup(py::module_& m) {
  py::class_<
      ProcessGroupResilient,
      NoGil<ProcessGroupResilient>,
      c10d::Backend>(
      m, "ProcessGroupResilient", "A group of ranks on the resilient engine.")
      .def_property_readonly(
          "options",
          [](const ProcessGroupResilient& self) { return self.groupOptions(); },
          "The settings in force (changes have no effect).");
  // Only the holder converts an intrusive_ptr: the return type is spelled out.
  m.def(
      "create",
      [](const c10d::DistributedBackendOptions& dist,
         const c10::intrusive_ptr<GroupOptions>& options) {
        return NoGil<ProcessGroupResilient>(create(dist, options));
      },
      py::arg("dist_opts"),
      py::arg("options") = py::none(),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "stats",
      [](ProcessGroupResilient& group) {
        GroupStats stats;
        {
          py::gil_scoped_release release;
          stats = group.stats();
        }
        return toPython(stats);
      },
      py::arg("group"));
  // The holder is not const in pybind11; the class has no method that changes.
  py::class_<RecordSeal, std::shared_ptr<RecordSeal>>(
      m, "RecordSeal", "Makes and checks the MAC of records in the store.")
      .def(
          "protect",
          &RecordSeal::protect,
          py::arg("key"),
          py::arg("value"),
          "The record to store for the value.")
      .def(
          "open",
          [](const RecordSeal& seal,
             const std::string& key,
             const std::string& record) {
            std::string value;
            if (const Status status = seal.open(key, record, value);
                !status.ok()) {
              throw py::value_error(status.message());
            }
            return value;
          },
          py::arg("key"),
          py::arg("record"),
          "The value. Raises ValueError if the record is not authentic.");
  m.def(
      "record_seal",
      [](ProcessGroupResilient& group) {
        return std::const_pointer_cast<RecordSeal>(group.recordSeal());
      },
      py::arg("group"));
  m.def(
      "topology",
      [](ProcessGroupResilient& group) {
        const auto topology = translated([&] {
          py::gil_scoped_release release;
          return group.topology();
        });
        py::dict d;
        d["sites"] = topology->sites();
        d["hosts"] = topology->hosts();
        d["algorithm"] = nameOf(topology->choice());
        d["declared"] = group.declaresSite();
        return d;
      },
      py::arg("group"));
  m.def(
      "set_topology",
      [](ProcessGroupResilient& group,
         std::vector<std::string> sites,
         const std::string& algorithm) {
        translated([&] {
          group.setTopology(std::move(sites), algorithmChoiceFrom(algorithm));
        });
      },
      py::arg("group"),
      py::arg("sites"),
      py::arg("algorithm"),
      py::call_guard<py::gil_scoped_release>());
}

WorkResilient& ours(c10d::Work& work, const char* function) {
  auto* mine = dynamic_cast<WorkResilient*>(&work);
  if (mine == nullptr) {
    throw py::type_error(
        std::string(function) +
        ": expected works of the resilient backend only");
  }
  return *mine;
}

// Seconds by the clock of Python's time.monotonic(), or None.
py::object endedAt(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto at = ours(*work, "ended_at").endedAt();
  return at ? py::object(py::float_(toSeconds(at->time_since_epoch())))
            : py::none();
}

// For this thread. The result is the previous setting in the form of the
// arguments: to pass it back restores it.
std::pair<double, double> setTolerance(double threshold, double maxLost) {
  if (!(maxLost >= 0 && maxLost <= 1)) {
    throw py::value_error("max_drop_fraction: expected 0 to 1");
  }
  if (std::isnan(threshold)) {
    throw py::value_error("threshold: not a number");
  }
  const Tolerance before = chosenTolerance;
  chosenTolerance.threshold = static_cast<float>(threshold);
  // Below zero nothing may be missing.
  chosenTolerance.maxLost = threshold < 0 ? 0 : static_cast<float>(maxLost);
  return {before.exact() ? -1.0 : before.threshold, before.maxLost};
}

// The index of the first ended work, or None when the time is up.
// The references in `mine` keep the works alive while no GIL protects the list.
// A failed work counts as ended, and its error is not raised here.
py::object waitAny(
    const std::vector<c10::intrusive_ptr<c10d::Work>>& works,
    std::optional<double> timeoutS) {
  std::vector<c10::intrusive_ptr<WorkResilient>> mine;
  for (const auto& work : works) {
    mine.push_back(
        c10::intrusive_ptr<WorkResilient>::reclaim_copy(
            &ours(*work, "wait_any")));
  }
  if (timeoutS && !(*timeoutS >= 0 && *timeoutS <= 1e9)) {
    throw py::value_error("wait_any: timeout_s: expected 0 to 1e9 or None");
  }
  std::optional<size_t> found;
  {
    py::gil_scoped_release release;
    const TimePoint deadline = timeoutS
        ? std::chrono::steady_clock::now() + fromSeconds(*timeoutS)
        : kNever;
    found = WorkResilient::waitAny(mine, deadline);
  }
  return found ? py::object(py::int_(*found)) : py::none();
}

void bindControl(py::module_& m) {
  m.def(
      "wait_any",
      &waitAny,
      py::arg("works"),
      py::arg("timeout_s") = py::none());
  m.def("ended_at", &endedAt, py::arg("work"));
  m.def(
      "dump",
      [] { return dumpRecentOperations(); },
      py::call_guard<py::gil_scoped_release>(),
      "Recent operations of this process as text, newest last.");
  m.def("option_table", &optionTableForPython);
  m.def(
      "rdma_ports",
      &rdmaPorts,
      "The addresses of RDMA devices that this process could use, and why not "
      "more.");
  m.def(
      "rdma_gpu_way",
      &rdmaGpuWay,
      py::arg("device"),
      py::arg("gpu"),
      py::arg("address"),
      "How an RDMA device can register GPU memory at this address: \"dmabuf\", "
      "\"peermem\" or \"staging\", and why the ways before that are none.");
  m.def("set_traffic_class", &setTrafficClass, py::arg("traffic_class"));
  m.def(
      "set_tolerance",
      &setTolerance,
      py::arg("threshold"),
      py::arg("max_drop_fraction"));
  m.def(
      "zero_filled",
      [](const c10::intrusive_ptr<c10d::Work>& work) {
        WorkResilient& send = ours(*work, "zero_filled");
        if (!send.isCompleted()) {
          throw std::runtime_error("zero_filled: the send has not completed");
        }
        return send.zeroFilled();
      },
      py::arg("work"));
  m.def(
      "set_log_level",
      [](const std::string& name) {
        const auto level = logLevelFromName(name);
        if (!level) {
          throw py::value_error(
              "log level \"" + name +
              "\": expected debug, info, warning or error");
        }
        setLogLevel(*level);
      },
      py::arg("level"));
  m.def(
      "add_fault",
      [](const std::string& rule) {
        return translated([&] { return addFault(rule); });
      },
      py::arg("rule"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "remove_fault",
      &removeFault,
      py::arg("fault"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "set_fault_step",
      &setFaultStep,
      py::arg("step"),
      py::call_guard<py::gil_scoped_release>());
  py::class_<OrderedHook, std::shared_ptr<OrderedHook>>(m, "OrderedHook")
      .def(py::init<>())
      .def(
          "begin",
          [](const std::shared_ptr<OrderedHook>& hook, uint64_t stamp) {
            OrderedHook::begin(hook, stamp);
          },
          py::arg("stamp"))
      .def_static("end", &OrderedHook::end);
  m.def("call_stamp", &CallOrder::stampNow);
  m.def("engine_running", &engineRunning);
  m.def("end_process", &endProcess, py::call_guard<py::gil_scoped_release>());
}

} // namespace

} // namespace resilient

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace resilient;
  // It registers c10d's own classes, which ours extend.
  py::module_::import("torch.distributed");
  // This registers the handler of fork() before any thread of ours exists.
  forkGeneration();
  setInterruptHook(&checkSignals);
  bindCallError(m);
  bindOptions(m);
  bindGroup(m);
  bindControl(m);
}
