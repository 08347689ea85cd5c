"""Where the journal may lie: its locks and shared memory work on a local disk only."""

from pathlib import Path

from tidemill.core.errors import RunFolderError

NETWORK_FILE_SYSTEMS = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "gfs",
        "gfs2",
        "ocfs2",
        "orangefs",
        "pvfs2",
        "glusterfs",
        "wekafs",
        "ncpfs",
        "coda",
        "davfs",
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.mount-s3",
        "fuse.rclone",
        "fuse.juicefs",
        "fuse.goofys",
        "fuse.blobfuse2",
        "fuse.davfs",
    )
)


def file_system_of(path: Path, mounts: str) -> str | None:
    """Type of the file system that holds `path`, after the text of `/proc/mounts`; None where that does not say."""
    target = path.resolve()
    best: tuple[int, str] | None = None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        mount = Path(_unescape(fields[1]))
        # Later lines are mounted over earlier ones, so they win where the depth is equal.
        if target.is_relative_to(mount) and (best is None or len(mount.parts) >= best[0]):
            best = (len(mount.parts), fields[2])
    return None if best is None else best[1]


def refuse_network_disk(path: Path, mounts_file: Path = Path("/proc/mounts")) -> None:
    """Raises `RunFolderError` where `path` lies on a network file system. One that we do not know is allowed."""
    try:
        mounts = mounts_file.read_text(errors="surrogateescape")
    except OSError:
        return
    kind = file_system_of(path, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        raise RunFolderError(
            f"{path} is on a network disk ({kind}), where a journal would be damaged: choose a run folder on a local "
            f"disk (--out); its blobs and store may stay on the network"
        )


def _unescape(mount: str) -> str:
    """Spaces and such are octal in `/proc/mounts`."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        mount = mount.replace(code, character)
    return mount
