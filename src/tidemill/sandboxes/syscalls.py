"""System calls that a sandbox refuses, with their numbers per architecture (as in the kernel's `unistd.h`).

Calls newer than 5.1 have one number everywhere. A call that an architecture lacks is absent from its table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One kernel ABI: how `seccomp` names it, and its numbers."""

    name: str
    audit_arch: int
    """`AUDIT_ARCH_*`; a call that comes in through another ABI is killed."""
    numbers: Mapping[str, int]
    x32_bit: int = 0
    """Numbers at or above this one are killed (the x32 ABI of x86_64); 0: there is no such ABI."""


DENIED = (  # noqa: SIM905
    # keys of the kernel: no namespace separates them
    "keyctl add_key request_key "
    # the kernel's largest and youngest attack surfaces
    "bpf perf_event_open userfaultfd fanotify_init memfd_secret lookup_dcookie "
    # other processes
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd move_pages migrate_pages "
    # mounts and namespaces
    "mount umount2 pivot_root chroot fsopen fsconfig fsmount fspick open_tree open_tree_attr move_mount "
    "mount_setattr listmount statmount unshare setns name_to_handle_at open_by_handle_at "
    # the machine itself
    "init_module finit_module delete_module kexec_load kexec_file_load syslog reboot swapon swapoff acct quotactl "
    "quotactl_fd settimeofday clock_settime clock_adjtime adjtimex vhangup sethostname setdomainname "
    # old interfaces that nothing alive uses
    "nfsservctl personality iopl ioperm modify_ldt uselib ustat sysfs _sysctl create_module get_kernel_syms "
    "query_module"
).split()
"""Fail with EPERM."""

ABSENT = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
"""Fail with ENOSYS, so that callers fall back: `clone3` hides its flags behind a pointer, where no filter sees them."""

_COMMON = {
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "statmount": 457,
    "listmount": 458,
    "open_tree_attr": 467,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
}

X86_64 = Architecture(
    name="x86_64",
    audit_arch=0xC000003E,
    x32_bit=0x40000000,
    numbers=MappingProxyType(
        _COMMON
        | {
            "keyctl": 250,
            "add_key": 248,
            "request_key": 249,
            "bpf": 321,
            "perf_event_open": 298,
            "userfaultfd": 323,
            "ptrace": 101,
            "process_vm_readv": 310,
            "process_vm_writev": 311,
            "kcmp": 312,
            "move_pages": 279,
            "migrate_pages": 256,
            "mount": 165,
            "umount2": 166,
            "pivot_root": 155,
            "chroot": 161,
            "unshare": 272,
            "setns": 308,
            "init_module": 175,
            "finit_module": 313,
            "delete_module": 176,
            "kexec_load": 246,
            "kexec_file_load": 320,
            "name_to_handle_at": 303,
            "open_by_handle_at": 304,
            "syslog": 103,
            "reboot": 169,
            "swapon": 167,
            "swapoff": 168,
            "acct": 163,
            "quotactl": 179,
            "settimeofday": 164,
            "clock_settime": 227,
            "clock_adjtime": 305,
            "adjtimex": 159,
            "vhangup": 153,
            "sethostname": 170,
            "setdomainname": 171,
            "fanotify_init": 300,
            "lookup_dcookie": 212,
            "nfsservctl": 180,
            "personality": 135,
            "iopl": 172,
            "ioperm": 173,
            "modify_ldt": 154,
            "uselib": 134,
            "ustat": 136,
            "sysfs": 139,
            "_sysctl": 156,
            "create_module": 174,
            "get_kernel_syms": 177,
            "query_module": 178,
            "clone": 56,
            "ioctl": 16,
            "socket": 41,
            "socketpair": 53,
        }
    ),
)

AARCH64 = Architecture(
    name="aarch64",
    audit_arch=0xC00000B7,
    numbers=MappingProxyType(
        _COMMON
        | {
            "keyctl": 219,
            "add_key": 217,
            "request_key": 218,
            "bpf": 280,
            "perf_event_open": 241,
            "userfaultfd": 282,
            "ptrace": 117,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "move_pages": 239,
            "migrate_pages": 238,
            "mount": 40,
            "umount2": 39,
            "pivot_root": 41,
            "chroot": 51,
            "unshare": 97,
            "setns": 268,
            "init_module": 105,
            "finit_module": 273,
            "delete_module": 106,
            "kexec_load": 104,
            "kexec_file_load": 294,
            "name_to_handle_at": 264,
            "open_by_handle_at": 265,
            "syslog": 116,
            "reboot": 142,
            "swapon": 224,
            "swapoff": 225,
            "acct": 89,
            "quotactl": 60,
            "settimeofday": 170,
            "clock_settime": 112,
            "clock_adjtime": 266,
            "adjtimex": 171,
            "vhangup": 58,
            "sethostname": 161,
            "setdomainname": 162,
            "fanotify_init": 262,
            "lookup_dcookie": 18,
            "nfsservctl": 42,
            "personality": 92,
            "clone": 220,
            "ioctl": 29,
            "socket": 198,
            "socketpair": 199,
        }
    ),
)
