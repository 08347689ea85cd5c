"""The seccomp filter of a sandbox, assembled here: a classic BPF program over `struct seccomp_data`.

What namespaces do not separate is refused by system call: kernel keys, AF_VSOCK and other address families, nested
namespaces, terminal injection, io_uring. A call through a foreign ABI (i386, x32) kills the process.
"""

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.core.errors import SandboxUnavailable
from tidemill.sandboxes.syscalls import AARCH64, ABSENT, DENIED, X86_64, Architecture

# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. Both architectures are little-endian.
OFFSET_NR = 0
OFFSET_ARCH = 4
OFFSET_ARGS = 16

RET_KILL_PROCESS = 0x80000000
RET_ERRNO = 0x00050000
RET_ALLOW = 0x7FFF0000

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

ALLOWED_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
CLONE_NEW_ANY = 0x7E020000
"""NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
TIOCSTI = 0x5412
TIOCLINUX = 0x541C


@dataclass(frozen=True)
class Instruction:
    """One instruction; a jump names the labels it goes to (empty: the next instruction)."""

    code: int
    k: int = 0
    if_true: str = ""
    if_false: str = ""
    label: str = ""


def assemble(program: list[Instruction]) -> bytes:
    """`struct sock_filter[]`. Raises `ValueError` for a label that is unknown, behind, or too far."""
    where = {item.label: index for index, item in enumerate(program) if item.label}
    packed = []
    for index, item in enumerate(program):
        jumps = []
        for label in (item.if_true, item.if_false):
            if label and label not in where:
                raise ValueError(f"instruction {index} jumps to {label!r}, which is no label")
            distance = where[label] - index - 1 if label else 0
            if not 0 <= distance <= 255:
                raise ValueError(f"instruction {index} jumps {distance} instructions; a jump goes 0 to 255 forward")
            jumps.append(distance)
        packed.append(struct.pack("<HBBI", item.code, *jumps, item.k))
    return b"".join(packed)


def _refuse(error: int, label: str = "") -> Instruction:
    return Instruction(RETURN, RET_ERRNO | error, label=label)


def _low_word(argument: int) -> int:
    """The kernel takes the arguments that we test as 32-bit integers: their upper halves mean nothing to it."""
    return OFFSET_ARGS + 8 * argument


def filter_program(architecture: Architecture) -> list[Instruction]:
    """Kill foreign ABIs, refuse `DENIED` and `ABSENT`, look at the arguments of four calls, allow the rest."""
    numbers = architecture.numbers
    program = [
        Instruction(LOAD, OFFSET_ARCH),
        Instruction(JUMP_EQUAL, architecture.audit_arch, if_false="kill"),
        Instruction(LOAD, OFFSET_NR),
    ]
    if architecture.x32_bit:
        program.append(Instruction(JUMP_GREATER_EQUAL, architecture.x32_bit, if_true="kill"))
    for name in DENIED:
        if name in numbers:
            program.append(Instruction(JUMP_EQUAL, numbers[name], if_true="refused"))
    for name in ABSENT:
        program.append(Instruction(JUMP_EQUAL, numbers[name], if_true="absent"))
    program += [
        Instruction(JUMP_EQUAL, numbers["socket"], if_true="family"),
        Instruction(JUMP_EQUAL, numbers["socketpair"], if_true="family"),
        Instruction(JUMP_EQUAL, numbers["clone"], if_true="clone"),
        Instruction(JUMP_EQUAL, numbers["ioctl"], if_true="ioctl"),
        Instruction(RETURN, RET_ALLOW),
        Instruction(LOAD, _low_word(0), label="family"),
        *(Instruction(JUMP_EQUAL, family, if_true="allow") for family in ALLOWED_FAMILIES),
        _refuse(errno.EAFNOSUPPORT),
        Instruction(LOAD, _low_word(0), label="clone"),
        Instruction(JUMP_ANY_BIT, CLONE_NEW_ANY, if_true="refused", if_false="allow"),
        Instruction(LOAD, _low_word(1), label="ioctl"),
        Instruction(JUMP_EQUAL, TIOCSTI, if_true="refused"),
        Instruction(JUMP_EQUAL, TIOCLINUX, if_true="refused"),
        Instruction(RETURN, RET_ALLOW, label="allow"),
        _refuse(errno.EPERM, label="refused"),
        _refuse(errno.ENOSYS, label="absent"),
        Instruction(RETURN, RET_KILL_PROCESS, label="kill"),
    ]
    return program


ARCHITECTURES: Mapping[str, Architecture] = {"x86_64": X86_64, "amd64": X86_64, "aarch64": AARCH64, "arm64": AARCH64}


def filter_bytes(machine: str | None = None) -> bytes:
    """The assembled filter of this machine. Raises `SandboxUnavailable` for an architecture without a table."""
    name = (machine or platform.machine()).lower()
    if name not in ARCHITECTURES:
        raise SandboxUnavailable(
            f"no system-call filter for {name}: sandboxes run on x86_64 and aarch64; use another machine as the worker"
        )
    return assemble(filter_program(ARCHITECTURES[name]))
