"""The table of merge methods: what each does, where it comes from, what it takes, and which laws it obeys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dpmerge.server.merging.methods.consensus import pcb, sce
from dpmerge.server.merging.methods.geometry import geometry
from dpmerge.server.merging.methods.least_squares import fisher, regmean
from dpmerge.server.merging.methods.linear import average, concat, task_arithmetic
from dpmerge.server.merging.methods.recipe import Method
from dpmerge.server.merging.methods.singular import iso_c, iso_cts, knots_ties, tsv, wudi
from dpmerge.server.merging.methods.sparse import breadcrumbs, dare, dare_ties, della, ties
from dpmerge.server.merging.methods.sphere import karcher, slerp
from dpmerge.server.merging.methods.stock import model_stock

LAWS = {
    "identity": "one adapter with weight 1 and density 1 is itself",
    "idempotent": "identical adapters give that adapter",
    "additive": "T identical adapters give T times that adapter",
    "cancels": "weights 1 and -1 of one adapter give zero",
    "rotation-free": "coordinates in other orthonormal bases, such as core space, change nothing",
    "factor-free": "the form of the factors, (B G⁻¹, G A) or ranks padded with zeros, changes nothing",
}
"""Laws that a row may declare; a contract test checks every row against those, and all rows against the others."""


@dataclass(frozen=True, kw_only=True)
class MergeMethod:
    """One row of the registry.

    Attributes:
        name: As written in a configuration.
        family: The file it lives in.
        summary: One line.
        source: arXiv id, or "-".
        function: Modules and recipe to what they combine to.
        laws: Keys of `LAWS` that hold.
        parameters: What it takes, with defaults; None is "chosen by the method", "required" has no default.
        limit: Parameters under which the method is another one, and that one's name.
        most: Largest number of parties, or None for any.
        statistics: Kind of `public_statistics` that it needs, or None.
        whole_model: It looks at all modules at once (a threshold, a norm), not at one after the other.
        noise: It asks how much of every adapter is noise.
    """

    name: str
    family: str
    summary: str
    source: str
    function: Method
    laws: frozenset[str]
    parameters: Mapping[str, float | str | None]
    limit: tuple[Mapping[str, float], str] | None = None
    most: int | None = None
    statistics: Literal["gram", "fisher"] | None = None
    whole_model: bool = False
    noise: bool = False


REQUIRED = "required"

METHODS = {
    method.name: method
    for method in (
        MergeMethod(
            name="average",
            family="linear",
            summary="Weighted mean of the weight changes.",
            source="2212.04089",
            function=average,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"rank": None},
        ),
        MergeMethod(
            name="task-arithmetic",
            family="linear",
            summary="Stated coefficient times the weighted sum.",
            source="2212.04089",
            function=task_arithmetic,
            laws=frozenset({"identity", "additive", "cancels", "rotation-free", "factor-free"}),
            parameters={"coefficient": REQUIRED, "rank": None},
        ),
        MergeMethod(
            name="concat",
            family="linear",
            summary="The weighted sum as stacked factors, without any decomposition.",
            source="-",
            function=concat,
            laws=frozenset({"identity", "additive", "cancels", "rotation-free", "factor-free"}),
            parameters={"coefficient": 1.0, "rank": None},
        ),
        MergeMethod(
            name="ties",
            family="sparse",
            summary="Trim small entries, elect signs, average what agrees.",
            source="2306.01708",
            function=ties,
            laws=frozenset({"identity", "idempotent", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.2, "semantics": "paper", "rank": None},
            whole_model=True,
        ),
        MergeMethod(
            name="dare",
            family="sparse",
            summary="Drop entries at random, rescale the rest, sum.",
            source="2311.03099",
            function=dare,
            laws=frozenset({"identity", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.5, "rank": None},
            limit=({"density": 1.0}, "task-arithmetic"),
        ),
        MergeMethod(
            name="dare-ties",
            family="sparse",
            summary="Drop entries at random, rescale, then elect signs and average what agrees.",
            source="2311.03099",
            function=dare_ties,
            laws=frozenset({"identity", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.5, "semantics": "paper", "rank": None},
            limit=({"density": 1.0}, "ties"),
        ),
        MergeMethod(
            name="della",
            family="sparse",
            summary="Drop small entries more often than large ones, rescale, elect signs, average.",
            source="2406.11617",
            function=della,
            laws=frozenset({"identity", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.5, "spread": 0.2, "semantics": "paper", "rank": None},
            limit=({"density": 1.0}, "ties"),
        ),
        MergeMethod(
            name="breadcrumbs",
            family="sparse",
            summary="Drop the largest and the small entries, sum the rest.",
            source="2312.06795",
            function=breadcrumbs,
            laws=frozenset({"identity", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.1, "outliers": 0.01, "rank": None},
            limit=({"density": 1.0}, "task-arithmetic"),
        ),
        MergeMethod(
            name="sce",
            family="balance",
            summary="Select what varies, weigh parties by its energy, erase minority signs.",
            source="2408.07990",
            function=sce,
            laws=frozenset({"identity", "idempotent", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.1, "rank": None},
        ),
        MergeMethod(
            name="pcb",
            family="balance",
            summary="Average by scores of an entry's size and its agreement with the sum.",
            source="2410.02396",
            function=pcb,
            laws=frozenset({"factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.1, "rank": None},
        ),
        MergeMethod(
            name="slerp",
            family="sphere",
            summary="Great circle between the directions of two parties, lengths averaged.",
            source="-",
            function=slerp,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"rank": None},
            most=2,
        ),
        MergeMethod(
            name="karcher",
            family="sphere",
            summary="Nearest direction to the parties' in angle, lengths averaged.",
            source="-",
            function=karcher,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"rank": None},
        ),
        MergeMethod(
            name="model-stock",
            family="stock",
            summary="The average, shortened by how much the parties disagree.",
            source="2403.19522",
            function=model_stock,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"rank": None},
        ),
        MergeMethod(
            name="knots-ties",
            family="subspace",
            summary="Align by one SVD of all adapters, then TIES on the right factors.",
            source="2410.19735",
            function=knots_ties,
            laws=frozenset({"identity", "idempotent", "factor-free"}),
            parameters={"coefficient": 1.0, "density": 0.2, "semantics": "paper", "rank": None},
        ),
        MergeMethod(
            name="tsv",
            family="subspace",
            summary="Whiten the concatenated singular vectors, keep the singular values.",
            source="2412.00081",
            function=tsv,
            laws=frozenset({"identity", "factor-free"}),
            parameters={"coefficient": 1.0, "rank": None},
        ),
        MergeMethod(
            name="iso-c",
            family="subspace",
            summary="Flatten the spectrum of the sum.",
            source="2502.04959",
            function=iso_c,
            laws=frozenset({"rotation-free", "factor-free"}),
            parameters={"coefficient": 1.0, "rank": None},
        ),
        MergeMethod(
            name="iso-cts",
            family="subspace",
            summary="Flatten the sum's leading directions and each adapter's own beside them.",
            source="2502.04959",
            function=iso_cts,
            laws=frozenset({"rotation-free", "factor-free"}),
            parameters={"coefficient": 1.0, "common_share": 0.8, "rank": None},
            limit=({"common_share": 1.0}, "iso-c"),
        ),
        MergeMethod(
            name="wudi",
            family="subspace",
            summary="Least interference with every adapter's row space, in closed form.",
            source="2503.08099",
            function=wudi,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"coefficient": 1.0, "ridge": 0.0, "rank": None},
        ),
        MergeMethod(
            name="regmean",
            family="least_squares",
            summary="Nearest outputs to the parties' own on public inputs.",
            source="2212.09849",
            function=regmean,
            laws=frozenset({"identity", "idempotent", "factor-free"}),
            parameters={"coefficient": 1.0, "off_diagonal": 0.9, "rank": None},
            statistics="gram",
        ),
        MergeMethod(
            name="fisher",
            family="least_squares",
            summary="Mean weighted entry by entry by sensitivity on public texts.",
            source="2111.09832",
            function=fisher,
            laws=frozenset({"identity", "idempotent", "factor-free"}),
            parameters={"coefficient": 1.0, "rank": None},
            statistics="fisher",
        ),
        MergeMethod(
            name="geometry",
            family="geometry",
            summary="A sum in which every party's change acts as fully as the others, and the noise, allow.",
            source="-",
            function=geometry,
            laws=frozenset({"identity", "idempotent", "rotation-free", "factor-free"}),
            parameters={"coefficient": None, "rank": None},
            whole_model=True,
            noise=True,
        ),
    )
}
