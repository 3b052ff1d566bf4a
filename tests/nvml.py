"""An NVIDIA driver made of a module: it answers as nvidia-ml-py does, and fails when told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeNvmlError(Exception):
    pass


@dataclass
class FakeGpu:
    name: str
    uuid: str
    used_bytes: int
    total_bytes: int
    processes: list[Any] = field(default_factory=list)
    instances: list[FakeGpu] | None = None


class FakeNvml(ModuleType):
    """Answers as nvidia-ml-py does; `fail` makes one of its functions raise."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.gpus: list[FakeGpu] = []
        self.opened = 0
        self.failing: dict[str, Exception] = {}

    def add(self, name: str = "NVIDIA T4", *, uuid: str = "", used_bytes: int = 0, total_bytes: int = 16 * 2**30, **more: Any) -> FakeGpu:
        gpu = FakeGpu(name, uuid or f"GPU-{len(self.gpus):08d}-aa", used_bytes, total_bytes, **more)
        self.gpus.append(gpu)
        return gpu

    def fail(self, function: str, words: str) -> None:
        self.failing[function] = FakeNvmlError(words)

    def works(self) -> None:
        self.failing.clear()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and (error := super().__getattribute__("failing").get(name)) is not None:

            def fails(*_: object) -> None:
                raise error

            return fails
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"570.1"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, at: int) -> FakeGpu:  # noqa: N802
        return self.gpus[at]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        everything = [one for gpu in self.gpus for one in (gpu, *(gpu.instances or ()))]
        found = [gpu for gpu in everything if gpu.uuid == uuid]
        if not found:
            raise FakeNvmlError("Not Found")
        return found[0]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:  # noqa: N802
        return SimpleNamespace(used=gpu.used_bytes, total=gpu.total_bytes)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:  # noqa: N802
        if gpu.instances is None:
            raise FakeNvmlError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, at: int) -> FakeGpu:  # noqa: N802
        if at == 0 or at > len(gpu.instances or ()):  # the first place is empty, as after an instance was taken away
            raise FakeNvmlError("Not Found")
        return (gpu.instances or [])[at - 1]
