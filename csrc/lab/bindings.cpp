#include <pybind11/pybind11.h>

#include "lab/carrier.h"

namespace resilient::lab {
namespace {

namespace py = pybind11;

PYBIND11_MODULE(_lab, m) {
  m.def(
      "carrier",
      &carrier,
      py::arg("control"),
      py::arg("owner"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace
} // namespace resilient::lab
