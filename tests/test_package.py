"""The package as torch and users meet it: import, registration, errors, traffic classes."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import types
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import torch_resilient
from torch_resilient import _native, _registration, options, traffic_class

REPORT = """
import sys
import torch.distributed as dist
print("resilient" in dist.Backend.backend_list, "torch_resilient._C" in sys.modules)
"""


@pytest.mark.parametrize("autoload", ["0", "1"])
@pytest.mark.parametrize(
    "imports",
    [
        "import torch_resilient",
        "import torch; import torch_resilient",
        "import torch.distributed; import torch_resilient",
        "from torch_resilient import traffic_class",
        "import torch_resilient, importlib; importlib.reload(torch_resilient)",
        "import torch_resilient; torch_resilient._autoload(); torch_resilient._autoload()",
    ],
)
def test_importing_the_package_registers_once_in_any_order(
    run_python: Callable[..., str], imports: str, autoload: str
) -> None:
    program = f"{imports}\n{REPORT}print(dist.Backend.backend_list.count('resilient'))"
    assert run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "True False\n1\n"


def test_torch_loads_the_backend_by_itself(run_python: Callable[..., str]) -> None:
    assert run_python("import torch\n" + REPORT) == "True False\n"


def test_autoload_can_be_turned_off(run_python: Callable[..., str]) -> None:
    program = "import torch\n" + REPORT
    assert run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False False\n"


@pytest.mark.parametrize("autoload", ["0", "1"])
def test_importing_from_two_threads(run_python: Callable[..., str], autoload: str) -> None:
    program = """
import threading
def load(name):
    __import__(name)
threads = [threading.Thread(target=load, args=(name,)) for name in ("torch_resilient", "torch")]
[thread.start() for thread in threads]
[thread.join(50) for thread in threads]
assert not any(thread.is_alive() for thread in threads)
"""
    report = run_python(program + REPORT, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert report == "True False\n"


def test_default_devices_keep_their_backends() -> None:
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


@pytest.mark.parametrize(("gpus", "devices"), [(0, ["cpu"]), (2, ["cpu", "cuda"])])
def test_a_group_gets_the_devices_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, devices: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = dist.BackendConfig(dist.Backend("resilient"))
    assert config.get_device_backend_map() == dict.fromkeys(devices, "resilient")
    declared = dist.Backend.backend_capability["resilient"]
    assert [*declared] == devices
    assert len(declared) == len(devices)
    assert ("cuda" in declared) == bool(gpus)
    assert repr(declared) == repr(devices)


def test_importing_the_package_does_not_look_for_gpus(run_python: Callable[..., str]) -> None:
    program = """
import torch
torch.cuda.device_count = lambda: exit("the package has asked for GPUs")
"""
    program += f"import torch_resilient\n{REPORT}"
    assert run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True False\n"


def test_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name="resilient")
    assert entry.value == "torch_resilient:_autoload"


def test_version_is_the_distributions() -> None:
    assert importlib.metadata.version("torch_resilient") == torch_resilient.__version__


def test_a_failing_registration_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(_registration, "register", fail)
    monkeypatch.setattr(_registration, "_warned", False)
    with pytest.warns(RuntimeWarning, match='"resilient" is not available: no luck'):
        torch_resilient._autoload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_resilient._autoload()


def test_a_failing_registration_never_raises(run_python: Callable[..., str]) -> None:
    # run_python makes every warning an error, and `import torch` would fail if one were raised.
    program = """
import contextlib, io
import torch.distributed
torch.distributed.is_available = lambda: False
with contextlib.redirect_stderr(io.StringIO()) as said:
    import torch_resilient
print(said.getvalue())
"""
    said = run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert '"resilient" is not available' in said


def test_no_distributed_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"built without torch\.distributed"):
        _registration.register()


@pytest.mark.parametrize(
    ("built_for", "found"),
    [("2.13.0+cpu", "2.12.1"), ("2.1.0", "2.13.0"), ("2.13.0", "3.13.0")],
)
def test_another_minor_version_of_torch_is_refused(built_for: str, found: str) -> None:
    with pytest.raises(ImportError) as caught:
        _native.check_versions(built_for, found)
    text = str(caught.value)
    assert f"built for torch {built_for}, but this is torch {found}" in text
    assert "pip install --no-build-isolation" in text
    assert "\n" not in text


@pytest.mark.parametrize("found", ["2.13.0+cpu", "2.13.1+cu130", "2.13.0a0+git1234"])
def test_the_same_minor_version_of_torch_is_accepted(found: str) -> None:
    _native.check_versions("2.13.0", found)


def test_versions_are_compared_before_the_binary_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = types.ModuleType("torch_resilient._build_info")
    info.TORCH_VERSION = "1.0.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_resilient._build_info", info)
    monkeypatch.setitem(sys.modules, "torch_resilient._C", None)
    with pytest.raises(ImportError, match=r"built for torch 1\.0\.0"):
        _native.load.__wrapped__()


def test_a_copy_that_was_not_built_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_resilient._build_info", None)
    with pytest.raises(ImportError, match="has not been built: run `pip install"):
        _native.load.__wrapped__()


def test_a_missing_binary_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_resilient._C", None)
    with pytest.raises(ImportError, match=r"_C cannot be loaded .*: run `pip install"):
        _native.load.__wrapped__()


def test_binary_was_built_for_this_torch() -> None:
    assert _native.load() is sys.modules["torch_resilient._C"]
    built_for = sys.modules["torch_resilient._build_info"].TORCH_VERSION
    assert built_for.split(".")[:2] == torch.__version__.split(".")[:2]


def test_options_are_backend_options_with_every_field_of_the_table() -> None:
    made = torch_resilient.Options()
    assert isinstance(made, c10d.Backend.Options)
    for option in options.table():
        if option.kind != "Secret":
            value = getattr(made, option.field)
            assert value == option.default, option.field
            assert type(value) is type(option.default) or option.kind == "Seconds", option.field
    made.chunk_bytes = 8192
    assert made.chunk_bytes == 8192


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Optoins'"):
        _ = torch_resilient.Optoins
    assert "Options" in dir(torch_resilient)


def current_class() -> int:
    """The traffic class of this thread: an index, or -1."""
    native = _native.load()
    value: int = native.set_traffic_class(-1)
    native.set_traffic_class(value)
    return value


def test_traffic_classes_nest_and_are_restored() -> None:
    assert current_class() == -1
    with traffic_class("bulk"):
        assert current_class() == 3
        with traffic_class("activation"):
            assert current_class() == 0
        assert current_class() == 3
    assert current_class() == -1


def test_traffic_class_is_restored_after_an_exception() -> None:
    with pytest.raises(KeyError), traffic_class("gradient"):
        raise KeyError
    assert current_class() == -1


def test_traffic_class_decorates_functions() -> None:
    @traffic_class("activation_gradient")
    def depth(n: int) -> int:
        """Kept."""
        assert current_class() == 1
        return depth(n - 1) if n else current_class()

    assert depth.__doc__ == "Kept."
    assert depth(3) == 1
    assert current_class() == -1


def test_traffic_class_belongs_to_one_thread() -> None:
    scope = traffic_class("bulk")
    seen: list[int] = []

    def other() -> None:
        seen.append(current_class())
        with scope:
            seen.append(current_class())
        seen.append(current_class())

    with scope:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert current_class() == 3
    assert seen == [-1, 3, -1]


def test_traffic_class_refuses_other_names() -> None:
    with pytest.raises(ValueError, match="'bulky': expected one of activation, "):
        traffic_class("bulky")


def test_traffic_class_refuses_functions_it_cannot_cover() -> None:
    async def coroutine() -> None: ...

    def generator():  # type: ignore[no-untyped-def]
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="use `with traffic_class"):
            traffic_class("bulk")(function)
