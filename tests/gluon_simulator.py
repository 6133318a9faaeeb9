"""Runs a Gluon kernel on the CPU: a stand-in for the parts of its language that our kernels use.

Gluon has no interpreter. Here the warpgroups of a program are threads, barriers in shared memory
block as the hardware's do, and what is asynchronous happens as late as it may: a copy when its
barrier is reached, a product when it is waited for. So a stage that is filled before it was read,
a barrier that is passed early and a row that is read past its end all show as wrong numbers or as
errors; what registers and the compiler do does not.
"""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

_SHIFT = 40  # an address is (number of the tensor << 40) + the element's place in its storage
_NOWHERE = 1 << 30  # what whole numbers in shared memory are before anything is stored there
_LAG = 0.012  # seconds by which a slow warpgroup is late
_PATIENCE = 20.0  # seconds for which a warpgroup may wait at a barrier


class Memory:
    """Tensors by number, so that an address says which tensor it is in."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def pointer(self, x: Tensor) -> Value:
        self.tensors.append(_flat(x))
        address = ((len(self.tensors) - 1) << _SHIFT) + x.storage_offset()
        return Value(torch.tensor(address), pointed=x.dtype)

    def load(self, address: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.zeros(address.shape, dtype=dtype)
        for number, at, chosen in self._parts(address, mask):
            out[chosen] = self.tensors[number][at]
        return out

    def store(self, address: Tensor, value: Tensor, mask: Tensor) -> None:
        for number, at, chosen in self._parts(address, mask):
            self.tensors[number][at] = value[chosen].to(self.tensors[number].dtype)

    def _parts(self, address: Tensor, mask: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for number in (address[mask] >> _SHIFT).unique().tolist():
            chosen = mask & (address >> _SHIFT == number)
            at = address[chosen] - (number << _SHIFT)
            size = len(self.tensors[number])
            if bool((at < 0).any()) or bool((at >= size).any()):
                raise IndexError(f"{at.min()} … {at.max()} of tensor {number} with {size} elements")
            yield number, at, chosen


def _flat(x: Tensor) -> Tensor:
    """Return all of a tensor's storage as one axis."""
    size = x.untyped_storage().nbytes() // x.element_size()
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (size,), (1,))


class Value:
    """A tensor in registers, or pointers where `pointed` is what they point to."""

    __array_priority__ = 1

    def __init__(self, data: Any, pointed: torch.dtype | None = None) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data)
        self.pointed = pointed
        self.type = SimpleNamespace(layout=None)

    @property
    def dtype(self) -> Any:
        if self.pointed is None:
            return self.data.dtype
        return SimpleNamespace(element_ty=self.pointed)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def to(self, dtype: torch.dtype, *, bitcast: bool = False) -> Value:
        return Value(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.pointed)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


_SUMS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")


def _binary(name: str) -> Callable[[Value, Any], Value]:
    def apply(self: Value, other: Any) -> Value:
        pointed = self.pointed or getattr(other, "pointed", None)
        mine, theirs = self.data, other.data if isinstance(other, Value) else other
        kinds = [x.dtype for x in (mine, theirs) if isinstance(x, Tensor)]
        if name not in _SUMS or any(kind not in (torch.int32, torch.int64) for kind in kinds):
            return Value(getattr(mine, name)(theirs), pointed)
        # Unlike in torch, a scalar widens too: pointers are 64 bits wide.
        wide = getattr(mine.long(), name)(theirs.long() if isinstance(theirs, Tensor) else theirs)
        if wide.is_floating_point() or torch.int64 in kinds:
            return Value(wide, pointed)
        if bool((wide != wide.int()).any()):
            raise OverflowError("a number does not fit 32 bits")
        return Value(wide.int(), pointed)

    return apply


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("and", "or", "xor", "rshift", "lt", "le", "gt", "ge", "eq", "ne"),
):
    setattr(Value, f"__{_name}__", _binary(f"__{_name}__"))
Value.__hash__ = None  # type: ignore[assignment]


def _data(x: Any) -> Tensor:
    return x.data if isinstance(x, Value) else torch.as_tensor(x)


class Shared:
    """A tensor in shared memory; it holds NaN until something is copied there."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype = data.dtype

    def index(self, place: Any) -> Shared:
        return Shared(self.data[int(place)])

    def slice(self, begin: int, length: int) -> Shared:
        return Shared(self.data[begin : begin + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def load(self, layout: object) -> Value:
        del layout
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        self.data.copy_(value.data)


class Barrier:
    """An mbarrier, or some of them."""

    def __init__(self, number: int, change: threading.Condition) -> None:
        self.members = [self] + [Barrier(1, change) for _ in range(number - 1)]
        self.change = change
        self.count = self.pending = self.phase = self.bytes = 0

    def index(self, place: Any) -> Barrier:
        return self.members[int(place)]

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        with self.change:
            if count > self.pending:
                raise RuntimeError(f"{count} arrivals at a barrier that expects {self.pending}")
            self.pending -= count
            self._turn()

    def expect(self, size: int) -> None:
        """Arrive, and wait for that many bytes of bulk copies too."""
        with self.change:
            self.bytes += size
        self.arrive(1)

    def receive(self, size: int) -> None:
        with self.change:
            self.bytes -= size
            self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.change.notify_all()

    def wait(self, parity: int) -> None:
        if self.count == 0:
            raise RuntimeError("a barrier was not initialised")
        with self.change:
            if not self.change.wait_for(lambda: self.phase % 2 != parity, _PATIENCE):
                raise RuntimeError("a warpgroup waits for ever")


class Simulator:
    """Launches kernels.

    Attributes:
        slow: Which warpgroups lag, so that the others get as far ahead as the barriers let them:
            those that copy, or those that multiply.
    """

    def __init__(self) -> None:
        self.slow: Literal["copies", "products"] | None = None
        self.memory = Memory()
        self.program = self.programs = 0
        self.local = threading.local()  # of each warpgroup: its copies under way

    def launch(self, kernel: Callable[..., None], programs: int, *args: Any, **flags: Any) -> None:
        self.memory, self.programs = Memory(), programs
        given = [self.memory.pointer(x) if isinstance(x, Tensor) else x for x in args]
        for self.program in range(programs):
            self.change = threading.Condition()
            kernel(*given, **flags)

    def load(self, pointer: Value, mask: Any = None, other: Any = 0) -> Value:
        address = pointer.data
        seen = torch.ones_like(address, dtype=torch.bool)
        if mask is not None:
            address, seen = torch.broadcast_tensors(address, _data(mask))
        assert pointer.pointed is not None
        got = self.memory.load(address, seen, pointer.pointed)
        return Value(torch.where(seen, got, torch.as_tensor(other, dtype=got.dtype)))

    def store(self, pointer: Value, value: Any, mask: Any = None) -> None:
        address = pointer.data
        seen = torch.ones_like(address, dtype=torch.bool) if mask is None else _data(mask)
        address, seen = torch.broadcast_tensors(address, seen)
        self.memory.store(address, _data(value).expand(address.shape), seen)

    def atomic_add(self, pointer: Value, value: int) -> Value:
        before = self.load(pointer)
        self.store(pointer, before + value)
        return before

    def copy(self, smem: Shared, pointer: Value, mask: Any = None) -> None:
        self.local.__dict__.setdefault("copies", []).append((smem, pointer, mask))

    def arrive_after_copies(self, barrier: Barrier, *, increment_count: bool) -> None:
        assert not increment_count
        if self.slow == "copies":
            time.sleep(_LAG)
        for smem, pointer, mask in self.local.__dict__.pop("copies", []):
            smem.data.copy_(self.load(pointer, mask).data)
        barrier.arrive(128)

    def wait(self, outstanding: int, deps: list[Any]) -> Any:
        del outstanding
        if self.slow == "products":
            time.sleep(_LAG)
        got = tuple(x() if callable(x) else x for x in deps)
        return got[0] if len(got) == 1 else got

    def bulk_copy(self, desc: Any, place: list[Any], barrier: Barrier, smem: Shared) -> None:
        row, col = (int(x) for x in place)
        rows, cols = smem.data.shape
        part = desc.base[row : row + rows, col : col + cols]
        assert part.shape == smem.data.shape
        smem.data.copy_(part)
        barrier.receive(part.numel() * part.element_size())

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if layout == "barrier":
            return Barrier(shape[0], self.change)
        unset = torch.nan if dtype.is_floating_point else _NOWHERE
        return Shared(torch.full(shape, unset, dtype=dtype))

    def warp_specialize(self, jobs: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(jobs) - 1
        errors: list[BaseException] = []

        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001 -- handed to the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=run, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def _asm(text: str, constraints: str, args: list[Value], dtype: Any, **_: Any) -> Value:
    """Return what the assembly that the kernels use computes."""
    del constraints, dtype
    if "cvt.rn" in text:
        kind = torch.bfloat16 if "bf16x2" in text else torch.float16
        low, high = (x.data.to(kind).view(torch.int16).int() for x in args)
        return Value((high << 16) | (low & 0xFFFF))
    if "shfl" in text:  # threads of a row raise what the row is held against
        top, most = args[0].data, args[1].data.amax(1, keepdim=True)
        return Value(torch.where(most > top + 8, most, top))
    if "vote" in text:
        return Value(args[0].data * args[1].data)
    return args[0]


def _multiply(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool) -> Any:
    """Return a product that is computed when it is waited for."""
    assert is_async

    def product() -> Value:
        before = acc() if callable(acc) else acc  # of a product that is under way itself
        return Value((before.data if use_acc else 0) + a.data.float() @ b.data.float())

    return product


def _split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0]), Value(x.data[..., 1])


def _where(condition: Value, yes: Any, no: Any) -> Value:
    pointed = getattr(yes, "pointed", None)
    return Value(torch.where(_data(condition), _data(yes), _data(no)), pointed)


def _layout_kept(x: Value, layout: object, *, assert_trivial: bool = False) -> Value:
    del layout, assert_trivial
    return x


def _range(*bounds: Any) -> Iterator[Value]:
    return (Value(torch.tensor(n, dtype=torch.int32)) for n in builtins.range(*map(int, bounds)))


def simulate(
    path: Path, sim: Simulator, modules: dict[str, ModuleType] | None = None
) -> ModuleType:
    """Load a kernel's source with the simulator in place of Triton and Gluon.

    Args:
        path: The source.
        sim: Runs it; modules that call one another share it.
        modules: What it imports of other kernels, simulated too, by their names.
    """
    ignore = lambda *_, **__: None  # noqa: E731 -- a layout that nobody looks at
    language = SimpleNamespace(
        constexpr=lambda x: x,
        program_id=lambda axis: Value(torch.tensor(sim.program, dtype=torch.int32)),
        num_programs=lambda axis: sim.programs,
        load=sim.load,
        store=sim.store,
        atomic_add=sim.atomic_add,
        arange=lambda begin, end, layout=None: Value(torch.arange(begin, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype)),
        full_like=lambda x, value: Value(torch.full_like(x.data, value)),
        where=_where,
        maximum=lambda a, b: Value(torch.maximum(_data(a), _data(b).to(_data(a).dtype))),
        minimum=lambda a, b: Value(torch.minimum(_data(a), _data(b).to(_data(a).dtype))),
        exp2=lambda x: Value(x.data.exp2()),
        log2=lambda x: Value(x.data.log2()),
        sum=lambda x, axis: Value(x.data.sum(axis)),
        max=lambda x, axis=None: Value(x.data.max() if axis is None else x.data.amax(axis)),
        min=lambda x, axis=None: Value(x.data.min() if axis is None else x.data.amin(axis)),
        reshape=lambda x, shape: Value(x.data.reshape(shape)),
        permute=lambda x, order: Value(x.data.permute(order)),
        split=_split,
        join=lambda a, b: Value(torch.stack([a.data, b.data], -1)),
        convert_layout=_layout_kept,
        multiple_of=lambda x, number: x,
        inline_asm_elementwise=_asm,
        static_range=builtins.range,
        allocate_shared_memory=sim.allocate,
        warp_specialize=sim.warp_specialize,
        SliceLayout=ignore,
        BlockedLayout=ignore,
        NVMMADistributedLayout=ignore,
        NVMMASharedLayout=ignore,
        SwizzledSharedLayout=ignore,
        DotOperandLayout=ignore,
        **{n: getattr(torch, n) for n in ("int16", "int32", "int64", "float32", "bfloat16")},
    )
    barriers = SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, phase: barrier.wait(int(phase)),
        arrive=lambda barrier, count: barrier.arrive(count),
        expect=lambda barrier, size: barrier.expect(size),
    )
    hopper = SimpleNamespace(
        async_copy=SimpleNamespace(async_load=sim.copy, mbarrier_arrive=sim.arrive_after_copies),
        fence_async_shared=ignore,
        mbarrier=barriers,
        tma=SimpleNamespace(async_load=sim.bulk_copy),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=sim.wait,
    )

    def jit(function: Any = None, **options: Any) -> Any:
        del options
        return jit if function is None else _Launched(function, sim)

    gluon = SimpleNamespace(jit=jit, language=language)
    triton = SimpleNamespace(jit=jit, language=language)
    fakes = {
        "triton": triton,
        "triton.language": language,
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        **(modules or {}),
    }
    module = ModuleType(f"simulated_{path.stem}")
    module.__dict__["range"] = _range
    kept = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)  # type: ignore[arg-type]
    try:
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)  # noqa: S102
    finally:
        for name, was in kept.items():
            sys.modules.pop(name)
            if was is not None:
                sys.modules[name] = was
    return module


class _Launched:
    """A jitted function: called by other kernels, or launched over a grid."""

    def __init__(self, function: Callable[..., Any], sim: Simulator) -> None:
        self.function, self.sim = function, sim

    def __call__(self, *args: Any, **flags: Any) -> Any:
        return self.function(*args, **flags)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **flags: Any) -> None:
            for option in ("num_warps", "enable_fp_fusion"):
                flags.pop(option, None)
            self.sim.launch(self.function, grid[0], *args, **flags)

        return launch
