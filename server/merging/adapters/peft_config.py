"""What PEFT's configuration says of an adapter's modules: rank, alpha, and what each one's B A is scaled by."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpmerge.common.errors import DpmergeError
from dpmerge.common.release.format import ADAPTER, CONFIG
from dpmerge.server.merging.adapters.names import has_tail, plain_name
from dpmerge.server.merging.adapters.patterns import PatternRefused, first_matches
from dpmerge.server.merging.adapters.settings import SAVE_AGAIN, factor_of, is_number, is_rank, shown, stated


@dataclass(frozen=True)
class Scalings:
    """Rank and alpha of every module of an adapter, looked up as PEFT does: the first pattern that matches wins.

    Attributes:
        ranks: Module → rank.
        alphas: Module → alpha.
        root: Whether alpha is divided by √rank, as with rsLoRA.
        party: Named in every refusal.
    """

    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    root: bool
    party: str

    def of(self, name: str, a: Sequence[int], b: Sequence[int]) -> float:
        """Return alpha/rank of a module, or alpha/√rank.

        Args:
            name: The module.
            a: Shape of A.
            b: Shape of B.

        Raises:
            DpmergeError: DPM-402 for shapes that contradict the configuration, such as those of a convolution.
        """
        rank = self.ranks[name]
        if len(a) != 2 or len(b) != 2:
            problem = f"{self.party}: {name} has A {tuple(a)} and B {tuple(b)}, as a convolution has"
            raise DpmergeError("DPM-402", problem, "train the adapter on linear layers and embeddings only")
        if a[0] != rank or b[1] != rank:
            problem = f"{self.party}: {name} has A {tuple(a)} and B {tuple(b)} where the configuration says rank {rank}"
            raise DpmergeError("DPM-402", problem, SAVE_AGAIN)
        return factor_of(rank, self.alphas[name], root=self.root)


def scalings(config: Mapping[str, Any], names: Collection[str], party: str) -> Scalings:
    """Look up rank and alpha of all modules.

    Args:
        config: PEFT's configuration, after `check_settings`.
        names: All modules of the adapter.
        party: Named in every refusal.

    Raises:
        DpmergeError: DPM-402 for patterns of forms that are not taken, or made to be matched for ever.
    """
    ranks = _of_modules(config, "r", "rank_pattern", names, party)
    alphas = _of_modules(config, "lora_alpha", "alpha_pattern", names, party)
    return Scalings(ranks, alphas, bool(stated(config, "use_rslora")), party)


def check_patterns(config: Mapping[str, Any], party: str) -> None:
    """Refuse rank and alpha patterns that are no object of numbers, naming the pattern.

    Args:
        config: adapter_config.json.
        party: Whose adapter it is, for refusals.

    Raises:
        DpmergeError: DPM-402.
    """
    for key, allowed, words in (
        ("rank_pattern", is_rank, "no integer of at least 1"),
        ("alpha_pattern", is_number, "no finite number"),
    ):
        patterns = stated(config, key)
        if patterns is not None and not isinstance(patterns, Mapping):
            raise DpmergeError("DPM-402", f"{party}: {key} = {shown(patterns)} is no object", SAVE_AGAIN)
        for pattern, value in (patterns or {}).items():
            if not allowed(value):
                problem = f"{party}: {key}.{shown(pattern, quoted=False)} = {shown(value)} is {words}"
                raise DpmergeError("DPM-402", problem, SAVE_AGAIN)


def check_targets(config: Mapping[str, Any], names: Collection[str], party: str) -> None:
    """Refuse tensors of modules that PEFT would not find by the configuration's own list: it would leave them out.

    Args:
        config: adapter_config.json.
        names: The modules that have tensors.
        party: Whose adapter it is, for refusals.

    Raises:
        DpmergeError: DPM-402.
    """
    targets, excluded = stated(config, "target_modules"), stated(config, "exclude_modules")
    if not isinstance(targets, list):
        return
    tails = [plain_name(target) for target in targets]
    tails += [tail.removeprefix("module.") for tail in tails if tail.startswith("module.")]
    exact = set(tails)
    short = {tail for tail in tails if "." not in tail}  # nearly all targets; asked first, since there may be many
    longer = [tail for tail in tails if "." in tail]
    outside = [
        name
        for name in names
        if not (name in exact or name.rpartition(".")[2] in short or has_tail(name, longer))
        or (isinstance(excluded, list) and has_tail(name, excluded))
    ]
    if outside:
        problem = f"{party}: {ADAPTER} changes {outside[0]}, which target_modules of {CONFIG} does not name"
        raise DpmergeError("DPM-402", problem, SAVE_AGAIN)


def _of_modules(config: Mapping[str, Any], key: str, pattern_key: str, names: Collection[str], party: str) -> Any:
    patterns = stated(config, pattern_key) or {}
    try:
        chosen = first_matches(patterns, names)
    except PatternRefused as refusal:
        fix = "name modules, or the ends of their names, with no more than . * + ? {n} [ ] and ( | ) between"
        raise DpmergeError("DPM-402", f"{party}: {pattern_key} of {CONFIG}: {refusal}", fix) from None
    everywhere = stated(config, key)
    return {name: patterns[chosen[name]] if name in chosen else everywhere for name in names}
