#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <thread>

#include "tests/device/strict_device.h"
#include "tests/device/strict_memory.h"

PYBIND11_MODULE(strict_device, m) {
  namespace py = pybind11;
  using namespace resilient::strict;
  using Nogil = py::call_guard<py::gil_scoped_release>;

  registerDevice();
  const auto current = []() -> Stream& {
    return currentStream(currentDeviceIndex());
  };
  m.def("device_count", [] { return kDevices; });
  m.def("current_device", &currentDeviceIndex);
  m.def("set_device", &setDeviceAndContext);
  m.def(
      "synchronize",
      [](int device) {
        for (Stream* s : allStreams(device)) {
          s->synchronize();
        }
      },
      py::arg("device") = 0,
      Nogil());
  m.def("set_copy_time", &setCopyTime, py::arg("mean_s"));
  m.def("set_copy_rate", &setCopyRate, py::arg("bytes_per_s"));
  m.def("limit_copies", &limitCopies, py::arg("count"));
  m.def("answer_late", &answerLate, py::arg("late"));
  m.def(
      "sleep",
      [current](double seconds) {
        current().enqueue([seconds] {
          std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        });
      },
      py::arg("seconds"));
  m.def("hold", [current] { current().hold(); });
  m.def("release", [current] { current().release(); });
  m.def("contexts", &devicesWithContext);
  // (id, high priority, tasks) of each stream that has been used.
  m.def("streams", [](int device) {
    py::list found;
    for (Stream* s : allStreams(device)) {
      found.append(py::make_tuple(s->id(), s->highPriority(), s->tasks()));
    }
    return found;
  });
  m.def("pinned_bytes", [] { return pinned().liveBytes(); });
  m.def("events_made", &eventsMade);
  m.def("begin_capture", &beginCapture);
  m.def("end_capture", &endCapture);
}
