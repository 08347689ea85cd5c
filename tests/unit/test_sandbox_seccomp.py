"""The filter, run by a small interpreter of classic BPF: what it decides, call by call."""

import errno
import struct

import pytest

from tidemill.core.errors import SandboxUnavailable
from tidemill.sandboxes import seccomp
from tidemill.sandboxes.syscalls import AARCH64, ABSENT, DENIED, X86_64, Architecture

ALLOW = seccomp.RET_ALLOW
KILL = seccomp.RET_KILL_PROCESS
EPERM = seccomp.RET_ERRNO | errno.EPERM
ENOSYS = seccomp.RET_ERRNO | errno.ENOSYS
NO_FAMILY = seccomp.RET_ERRNO | errno.EAFNOSUPPORT
BOTH = pytest.mark.parametrize("architecture", [X86_64, AARCH64], ids=lambda each: each.name)
ORDINARY = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "fork": 57, "execve": 59, "openat": 257, "getrandom": 318},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "execve": 221, "openat": 56, "getrandom": 278},
}


def interpret(program: bytes, number: int, arch: int, arguments: tuple[int, ...] = ()) -> int:
    """The return value of the filter for one call."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(arguments + (0,) * 6)[:6])
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, k = instructions[position]
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code in (0x15, 0x35, 0x45):
            taken = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            position += if_true if taken else if_false
        else:
            assert code == 0x06
            return int(k)


def decide(architecture: Architecture, name: str, *arguments: int) -> int:
    program = seccomp.assemble(seccomp.filter_program(architecture))
    return interpret(program, architecture.numbers[name], architecture.audit_arch, arguments)


@BOTH
def test_ordinary_calls_pass(architecture: Architecture) -> None:
    program = seccomp.assemble(seccomp.filter_program(architecture))
    for number in ORDINARY[architecture.name].values():
        assert interpret(program, number, architecture.audit_arch) == ALLOW


@BOTH
def test_listed_calls_are_refused(architecture: Architecture) -> None:
    for name in DENIED:
        if name in architecture.numbers:
            assert decide(architecture, name) == EPERM, name
    for name in ABSENT:
        assert decide(architecture, name) == ENOSYS, name
    for name in ("keyctl", "bpf", "ptrace", "mount", "unshare", "setns", "process_vm_writev", "open_by_handle_at"):
        assert decide(architecture, name) == EPERM, name


@BOTH
def test_numbers_are_unique(architecture: Architecture) -> None:
    numbers = list(architecture.numbers.values())
    assert len(set(numbers)) == len(numbers)
    assert set(architecture.numbers) <= {*DENIED, *ABSENT, "clone", "ioctl", "socket", "socketpair"}


@BOTH
def test_only_three_families_of_sockets(architecture: Architecture) -> None:
    for call in ("socket", "socketpair"):
        for family in range(64):
            expected = ALLOW if family in (1, 2, 10) else NO_FAMILY
            assert decide(architecture, call, family, 1, 0) == expected, family
        # The kernel takes an int: bits above the low word must not smuggle AF_VSOCK through, nor hide AF_UNIX.
        assert decide(architecture, call, (1 << 32) | 40) == NO_FAMILY
        assert decide(architecture, call, (1 << 32) | 1) == ALLOW


@BOTH
def test_clone_makes_threads_and_processes_but_no_namespaces(architecture: Architecture) -> None:
    thread, process = 0x3D0F00, 17
    assert decide(architecture, "clone", thread) == ALLOW
    assert decide(architecture, "clone", process) == ALLOW
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(architecture, "clone", process | flag) == EPERM, hex(flag)


@BOTH
def test_terminals_cannot_be_typed_into(architecture: Architecture) -> None:
    for request in (0x5412, 0x541C):
        assert decide(architecture, "ioctl", 0, request) == EPERM
        assert decide(architecture, "ioctl", 0, request | (1 << 40)) == EPERM
    assert decide(architecture, "ioctl", 0, 0x5401) == ALLOW


@BOTH
def test_other_abis_are_killed(architecture: Architecture) -> None:
    program = seccomp.assemble(seccomp.filter_program(architecture))
    other = AARCH64 if architecture is X86_64 else X86_64
    for arch in (0x40000003, 0x40000028, 0, other.audit_arch):
        assert interpret(program, 1, arch) == KILL
    if architecture is X86_64:
        assert interpret(program, 0x40000000 | 39, architecture.audit_arch) == KILL
        assert interpret(program, 0x40000000 | 520, architecture.audit_arch) == KILL


def test_the_assembler_refuses_bad_jumps() -> None:
    end = seccomp.Instruction(seccomp.RETURN, 0, label="end")
    jump = seccomp.Instruction(seccomp.JUMP_EQUAL, 0, if_true="end")
    assert len(seccomp.assemble([jump, end])) == 16
    with pytest.raises(ValueError, match="no label"):
        seccomp.assemble([jump])
    with pytest.raises(ValueError, match="forward"):
        seccomp.assemble([end, jump])
    with pytest.raises(ValueError, match="forward"):
        seccomp.assemble([jump, *[seccomp.Instruction(seccomp.LOAD, 0)] * 256, end])


def test_a_machine_without_a_table_is_told_so() -> None:
    assert seccomp.filter_bytes("AMD64") == seccomp.filter_bytes("x86_64") != seccomp.filter_bytes("aarch64")
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        seccomp.filter_bytes("riscv64")
