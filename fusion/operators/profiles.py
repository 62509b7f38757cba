"""Profiles of serving software: the version of torch_npu, and the packages of operators, that a release installs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fusion.operators.vendor_versions import PREFIX


@dataclass(frozen=True)
class Profile:
    """A release of serving software, whose name in the option `packages` stands for the packages that come with it.

    Attributes:
        name: name of the distribution and its minor version, such as "vllm_ascend-0.26".
        packages: names of `PACKAGES`, and "torch_npu==" with a version.
        cann: version of CANN that the release requires.
        source: page that states the versions.
    """

    name: str
    packages: tuple[str, ...]
    cann: str
    source: str


_MATRIX = "https://github.com/vllm-project/vllm-ascend, docs/source/community/versioning_policy.md"


def _vllm_ascend(version: str, torch_npu: str, cann: str, source: str = _MATRIX) -> Profile:
    return Profile(f"vllm_ascend-{version}", (f"{PREFIX}{torch_npu}", "vllm_ascend"), cann, source)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        each.name: each
        for each in (
            _vllm_ascend("0.11", "2.7", "8.3.RC2"),
            _vllm_ascend("0.12", "2.8", "8.3.RC2"),
            _vllm_ascend(
                "0.26", "2.10", "9.1.0", "https://docs.vllm.ai/projects/ascend/en/v0.26.0rc1/installation.html"
            ),
        )
    }
)
"""Name -> profile, the oldest release first."""


def expand_profiles(names: Collection[str]) -> frozenset[str]:
    """Replace the names of `PROFILES` in `names` by the names of their packages."""
    named = [PROFILES[each].packages if each in PROFILES else (each,) for each in names]
    return frozenset(package for packages in named for package in packages)
