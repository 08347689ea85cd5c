"""The chain of published versions: no gap, no fork, every payload what its manifest says."""

from typing import Any

import xxhash

from tidemill.reports.audit.deltas import DELTA_FILE, WEIGHTS_FILE, RawTensors, Versions
from tidemill.reports.audit.readers import Run
from tidemill.reports.audit.report import Line, line_of, unseen


def check_chain(run: Run) -> Line:
    """Versions 0, 1, … without a gap, of one run and one model, steps in order, each from the batch before it."""
    name = "versions chain"
    if not run.manifests:
        return unseen(name, "no version was published")
    problems = list(run.manifest_problems)
    expected = list(range(len(run.manifests)))
    if sorted(run.manifests) != expected:
        missing = sorted(set(range(max(run.manifests))) - set(run.manifests))
        problems.append(f"versions {missing} are missing below version {max(run.manifests)}")
    previous: dict[str, Any] | None = None
    for version, manifest in sorted(run.manifests.items()):
        problems += _links(version, manifest, previous)
        previous = manifest
    head = max(run.manifests)
    return line_of(name, problems, f"0 to {head}, one run, one model", figures={"head": float(head)})


def _links(version: int, manifest: dict[str, Any], previous: dict[str, Any] | None) -> list[str]:
    problems = []
    if manifest["version"] != version:
        problems.append(f"the manifest of version {version} says version {manifest['version']}")
    if (version == 0) != (manifest["batch"] is None):
        problems.append(f"version {version} comes from batch {manifest['batch']}")
    if (manifest["kind"] == "full") != (manifest["parent"] is None):
        problems.append(f"version {version} is {manifest['kind']} with parent {manifest['parent']}")
    if previous is not None:
        for field in ("run_id", "model"):
            if manifest[field] != previous[field]:
                problems.append(f"version {version} has another {field} than version {version - 1}")
        if manifest["step"] <= previous["step"]:
            problems.append(f"version {version} was published at step {manifest['step']}, not after its predecessor")
        if manifest["tensors"].keys() != previous["tensors"].keys():
            problems.append(f"version {version} has other tensors than version {version - 1}")
    return problems


def check_payloads(run: Run) -> Line:
    """Every file of every version is there with the sha256 of its name; every tensor, once the deltas have been applied
    by the audit's own decoder, with its xxh3-128."""
    name = "version payloads"
    if not run.manifests:
        return unseen(name, "no version was published")
    problems: list[str] = []
    num_tensors = num_bytes = num_deltas = 0
    versions = Versions(run)
    for version, manifest in sorted(run.manifests.items()):
        size = 0
        for file, blob in sorted(manifest["files"].items()):
            try:
                data = run.store_blobs.get(blob)
            except ValueError as error:
                problems.append(f"version {version}, {file}: {error}")
                continue
            size += len(data)
            if file in (WEIGHTS_FILE, DELTA_FILE):
                problems += [f"version {version}: {problem}" for problem in _tensors(versions, version, manifest)]
                num_tensors += len(manifest["tensors"])
                num_deltas += file == DELTA_FILE
        if size != manifest["num_bytes"] and not problems:
            problems.append(f"version {version}: {size} bytes, and its manifest says {manifest['num_bytes']}")
        num_bytes += size
    counts = f"{len(run.manifests)} versions ({num_deltas} as deltas), {num_tensors} tensors"
    figure = f"{counts}, {num_bytes / 1e6:.1f} MB hashed again"
    return line_of(name, problems, figure, figures={"bytes": float(num_bytes), "tensors": float(num_tensors)})


def _tensors(versions: Versions, version: int, manifest: dict[str, Any]) -> list[str]:
    hashes: dict[str, str] = manifest["tensors"]
    try:
        tensors: RawTensors = versions.get(version)
    except ValueError as error:
        return [str(error)]
    problems = [f"tensor {name} is not in both manifest and file" for name in sorted(tensors.keys() ^ hashes.keys())]
    for name in sorted(tensors.keys() & hashes.keys()):
        if xxhash.xxh3_128_hexdigest(tensors[name][2]) != hashes[name]:
            problems.append(f"tensor {name} is not the one that was hashed")
    return problems
