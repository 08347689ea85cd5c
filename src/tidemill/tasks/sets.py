"""The task sets that ship as a manifest, and what they are made from."""

from tidemill.tasks.packages import PackagePin

MEND_V1 = (
    PackagePin(name="boltons", version="26.2.0", license="BSD-3-Clause"),
    PackagePin(name="funcy", version="2.1", license="BSD-3-Clause"),
    PackagePin(name="inflection", version="0.5.1", license="MIT"),
    PackagePin(name="isodate", version="0.7.2", license="BSD-3-Clause"),
    PackagePin(name="pydash", version="8.1.0", license="MIT", requires=("typing_extensions",)),
    PackagePin(name="schema", version="0.7.8", license="MIT"),
    PackagePin(name="toolz", version="1.0.0", license="BSD-3-Clause"),
)
"""Small functions, many literal calls, quick tests: pure Python under permissive licences."""
