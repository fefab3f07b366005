"""Finds by trying how a model computes rows: which may share a forward, and whether attention reads block tables.

A trial runs the model on a few tokens and compares logits with those of each sequence alone, and these with those of
generate. A model that derives positions from the length of the cache, for example, gives other logits with padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from transformers import GenerationConfig

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.rows.forwards import Rows
from hf_paged.features.rows.pieces import Part
from hf_paged.features.rows.rows import RowModel, Together, Way
from hf_paged.features.rows.states import SizesOfTensors, States
from hf_paged.features.watch.foreign import foreign_code
from hf_paged.integration.attention import OWN_MASK
from hf_paged.model.devices import device_of, is_offloaded
from hf_paged.model.inputs import trial_ids
from hf_paged.model.overrides import Override
from hf_paged.model.packed_step import own_forward
from hf_paged.model.report import SupportReport
from hf_paged.model.state import Slot
from hf_paged.model.support import examine, rotary_limit
from hf_paged.model.trial import Refusal, Trial, attempt, difference, trying

_ways: Slot[tuple[object, Way | Refusal]] = Slot("way to compute rows", is_released=False)


def way_of(model: Model, tried: Model | None = None) -> Way:
    """Tries the model on a few tokens, if it has changed. tried: the model, or its `bare_copy`.

    Raises UnsupportedModelError if sequences one by one give other logits than generate.
    """
    stamp, kept = examine(model).stamp, _ways.get(model)
    if kept is not None and kept[0] == stamp:
        way = kept[1]
    else:
        with trying(device_of(model)):
            way = _try(model, model if tried is None else tried)
        if not isinstance(way, Refusal) or way.passing is None:
            _ways.put(model, (stamp, way))
    if isinstance(way, Refusal):
        raise UnsupportedModelError(way.reason) from way.passing
    return way


def _try(model: Model, tried: Model) -> Way | Refusal:
    name = type(model).__name__
    plain = attempt(partial(_generated, tried), f"plain generate of {name} fails ({{}}); mend that first")
    if isinstance(plain, Refusal):
        return plain
    trial = _Trial(model, tried, plain[0])
    if (refusal := trial.refusal(plain[1])) is not None:
        return refusal
    cache = Rows(model, PagedMemory(4)).cache
    # What a window of a dense view holds depends on when it is filled.
    windows = not trial.by_tables and any(isinstance(each, PagedLayer) and each.is_sliding for each in cache.layers)
    # Beyond the limit a prompt's first chunk has other rotary frequencies than the whole prompt.
    depends = trial.grows or windows or rotary_limit(model) is not None
    # A piece may be a single token, for which recurrent layers have a function of its own.
    resumes = not depends and (not cache.keeps_states or trial.splits_prompts(by_one=True))
    depends_on_split = not resumes or not trial.splits_prompts()
    no_prefixes = ""
    if trial.grows:
        no_prefixes = f"{name} keeps states that grow with the tokens"
    elif not resumes or (depends_on_split and not cache.keeps_states):
        no_prefixes = f"what {name} computes depends on how a prompt is split"
    prompts, decodes = trial.together()
    return Way(
        trial.by_tables,
        depends_on_split,
        prompts,
        decodes,
        "one" if depends_on_split else trial.pieces_together(decodes),
        trial.state_bytes,
        trial.tensor_bytes,
        trial.bytes_per_token,
        no_prefixes,
    )


def batch_obstacle(model: Model, report: SupportReport) -> str | None:
    """Why `generate` does not get the tokens of its padded batch from rows that attend by block tables, of a model that
    does not run packed. Tried only where states alone keep it from that."""
    if not report.supported or not PagedKVCache(model.config).keeps_states:
        return report.reason
    if (foreign := foreign_code(model).look()) is not None:
        return foreign
    if model.training:
        return f"{report.model} is in training mode"
    if rotary_limit(model) is not None:
        return "the model's rotary frequencies depend on the longest sequence of the batch"
    if is_offloaded(model):
        return f"parts of {report.model} are offloaded"
    try:
        way = way_of(model)
    except UnsupportedModelError:
        return report.reason
    return None if way.by_tables and way.prompts == way.decodes == "any" else report.reason


def bind_rows(
    model: Model, memory: PagedMemory, tried: Model | None = None, overrides: Sequence[Override] = ()
) -> RowModel:
    """The model bound to a memory. tried: as for `way_of`, which may raise. overrides: as for Rows."""
    return RowModel(model, memory, way_of(model, tried), overrides)


# 1 comes first: the other numbers are compared with its logits.
_ROWS_TRIED = (1, 2, 3, 5, 16)
# Enough to fill a block of four tokens and to begin another one.
_TOKENS_TRIED = 6


def rows_that_differ(model: Model, tried: Model) -> int:
    """Return the least number of sequences tried in which the first gets other bits than alone; 0 if none has.

    Each sequence is computed token by token. tried: the model, or its `bare_copy`.
    """
    alone: torch.Tensor | None = None
    for count in _ROWS_TRIED:
        tokens = [[1 + (5 * start + seq_id) % 7 for start in range(_TOKENS_TRIED)] for seq_id in range(count)]
        first = _bound_logits(model, tried, [(own, (1,) * _TOKENS_TRIED) for own in tokens])[0]
        alone = first if alone is None else alone
        if not first.equal(alone):
            return count
    return 0


def is_other_by_token(model: Model, tried: Model) -> bool:
    """Return True if a prompt's logits token by token differ from those at once by more than rounding explains."""
    ids = [1 + (5 * place) % 7 for place in range(2 * _TOKENS_TRIED)]
    whole, by_token = (_bound_logits(model, tried, [(ids, cut)])[0][-1] for cut in ((len(ids),), (1,) * len(ids)))
    far = _FAR_IN_FP32 if whole.dtype == torch.float32 else _FAR_IN_HALF
    error, largest = difference(model.dtype, by_token, whole)
    return not error <= far * largest


def _bound_logits(model: Model, tried: Model, rows: list[_Cut]) -> list[torch.Tensor]:
    """The logits of `_in_steps` of the model as an engine runs it."""
    with trying(device_of(model)):
        bound = bind_rows(model, PagedMemory(4, growable=True), tried)
        return _in_steps(rows, bound.memory, lambda step, parts: bound.forward(parts, tried=tried))


_FAR_IN_FP32, _FAR_IN_HALF = 0.02, 0.25
"""Largest deviation, relative to the largest logit. (In half precision, routers of tiny models fall the other way.)"""


def _has_kv(model: Model) -> bool:
    """Return True if layers of the model's cache keep K/V of all tokens or of a window."""
    if not model._supports_default_dynamic_cache():
        return False
    return any(isinstance(layer, PagedLayer) for layer in PagedKVCache(model.config).layers)


_Cut = tuple[list[int], tuple[int, ...]]
"""Tokens, and the lengths of the pieces in which they are computed."""


def _in_steps(
    rows: list[_Cut],
    memory: PagedMemory,
    compute: Callable[[int, list[Part]], Iterable[torch.Tensor]],
    *,
    every: bool = False,
) -> list[torch.Tensor]:
    """For each row the logits [number of pieces, vocab] after each of its pieces, or with `every` those after each of
    its tokens. compute: gets the number of a step, and the next piece of every row."""
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    for step in range(len(rows[0][1])):
        parts = []
        for number, (tokens, cuts) in enumerate(rows):
            end = done[number] + cuts[step]
            parts.append(Part(number, tokens[done[number] : end], done[number], cuts[step] if every else 1))
            done[number] = end
        memory.append([(part.seq_id, len(part.ids)) for part in parts])
        for own, result in zip(logits, compute(step, parts)):
            own.append(result)
    return [torch.cat(own) for own in logits]


def _generated(tried: Model) -> tuple[list[int], torch.Tensor]:
    """Seven tokens, of which generate has added two, and the logits [3, vocab] from the fifth on."""
    ids = trial_ids(tried, torch.arange(5, dtype=torch.int64, device=device_of(tried))[None])
    without_defaults = copy.copy(tried)  # the modules are the same
    if (own := own_forward(tried)) is not None:
        vars(without_defaults)["forward"] = own
    # The model's own options may end the call early, or need more than a model, as stop strings do.
    without_defaults.generation_config = GenerationConfig()
    plain = without_defaults.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return plain.sequences[0, :7].tolist(), torch.cat(plain.logits).float()


class _Trial:
    """Runs a model on a few tokens, in rows that share forwards or do not."""

    def __init__(self, model: Model, tried: Model, tokens: list[int]) -> None:
        self._model = model
        self._tried = tried
        self.grows = False  # whether states are larger after more tokens
        self._varies = False  # whether their shape is another, so that sequences of other lengths cannot be joined
        self.state_bytes: dict[torch.device, int] = {}  # of a sequence, on each device, without what grows
        self.tensor_bytes: dict[torch.device, int] = {}  # of the largest tensor of it
        self.bytes_per_token: dict[torch.device, int] = {}  # by which they grow
        # A mask of the model's own may choose among the tokens once they are many.
        self._chooses = OWN_MASK in examine(model).bare.reason
        self._long, self._other, self._short = tokens, tokens[::-1], tokens[:1:-1]
        self._noise = 0.0  # the largest difference of logits of the same tokens at once and one by one
        self.by_tables = not self._chooses and _has_kv(model)

    def refusal(self, expected: torch.Tensor) -> Refusal | None:
        """Why sequences one by one do not give the logits that generate gives for the long one; None if they do.

        Without block tables from then on, if they do only so."""
        trial = Trial(self._model, self._compute_alone, [expected], "{}", "its", "its logits are not those of generate")
        refusal = trial.refusal()
        if refusal is not None and self.by_tables:
            self.by_tables = False
            refusal = trial.refusal()
        if refusal is None:
            return None
        reason = (
            f"{type(self._model).__name__} cannot be computed one sequence at a time ({refusal.reason}); call generate"
        )
        return refusal._replace(reason=reason)

    def _compute_alone(self) -> list[torch.Tensor]:
        # Another sequence is computed between the pieces, to detect models that keep a state in their modules.
        self._alone = self._run([(self._long, (5, 1, 1)), (self._other, (5, 1, 1))], "one", "one")
        return self._alone[:1]

    def splits_prompts(self, *, by_one: bool = False) -> bool:
        """Return True if a prompt in two pieces has the same logits as in one. by_one: the second piece token by token.

        A state that is lost at the cut changes the logits right after it most. These are rounded too, in low precision
        by more than the tolerance, but not by more than those of single tokens."""
        # 21 tokens, cut within a block, and with pieces of several lengths.
        tokens = [*self._long, *self._other, *self._long]
        cuts = (20, 1), (7, *((1,) * 13 if by_one else (13,)), 1)
        both = attempt(lambda: [self._run([(tokens, cut)], "one", "one", every=True)[0][7:] for cut in cuts])
        if isinstance(both, Refusal):  # some models assert that a prompt is not split
            return False
        whole, split = both
        if by_one:
            # By how much rounding alone differs, which the comparison of two pieces tolerates.
            self._noise, _ = difference(self._model.dtype, split, whole)
            return Trial(self._model, [split[-2:]], [whole[-2:]]).refusal() is None
        return Trial(self._model, [split], [whole], noise=self._noise).refusal() is None

    def together(self) -> tuple[Together, Together]:
        """Find the rows that may share a forward in which they begin, and a forward of the next token of each."""
        uneven: list[_Cut] = [(self._long, (5, 1, 1)), (self._short, (3, 1, 1))]
        even: list[_Cut] = [(self._long, (5, 1, 1)), (self._other, (5, 1, 1))]
        short = attempt(lambda: self._run(uneven[1:], "one", "one"))
        if isinstance(short, Refusal):
            return "one", "one"
        alone = [self._alone[0], *short]
        decodes: Together = "equal"
        # In these two cases a trial of a few tokens does not show what padding does.
        if not self._varies and not self._chooses:
            if self._same(uneven, alone, "any", "any"):
                return "any", "any"
            decodes = "any" if self._same(uneven, alone, "one", "any") else "equal"
        if decodes == "equal" and not self._same(even, self._alone, "one", "equal"):
            return "one", "one"
        return ("equal" if self._same(even, self._alone, "equal", decodes) else "one"), decodes

    def pieces_together(self, decodes: Together) -> Together:
        """Find the rows that may share a forward of equally many further tokens of each."""
        long, other, short = (self._long, (3, 3, 1)), (self._other, (3, 3, 1)), (self._short, (1, 3, 1))
        alone = attempt(lambda: [self._run([row], "one", "one")[0] for row in (long, other, short)])
        if isinstance(alone, Refusal):
            return "one"
        if decodes == "any" and self._same([long, short], [alone[0], alone[2]], "one", "any"):
            return "any"
        return "equal" if decodes != "one" and self._same([long, other], alone[:2], "one", "equal") else "one"

    def _same(self, rows: list[_Cut], alone: list[torch.Tensor], prompts: Together, go_on: Together) -> bool:
        """Return True if the rows together have the logits that they have alone."""
        return Trial(self._model, partial(self._run, rows, prompts, go_on), alone).refusal() is None

    def _run(self, rows: list[_Cut], prompts: Together, go_on: Together, *, every: bool = False) -> list[torch.Tensor]:
        """The logits of `_in_steps`, in fp32. prompts, go_on: "one" if the first, or the later pieces of the rows are a
        forward each."""
        # New states and blocks for each run, so that no run finds what another one has left.
        memory = PagedMemory(4, growable=True)
        computed = Rows(self._model, memory, by_tables=self.by_tables)

        def compute(step: int, parts: list[Part]) -> Iterable[torch.Tensor]:
            states, first = computed.states, parts[0]
            before = (
                (states.bytes_of(0, first.start), states.shape_number(0, first.start))
                if computed.has_states and step
                else None
            )
            batches = [[part] for part in parts] if (go_on if step else prompts) == "one" else [parts]
            results = [result for batch in batches for result in computed.compute(self._tried, batch)]
            if self.by_tables:
                computed.refuse_windows()
            if before is not None:
                self._look_at_states(*before, computed.states, first)
            return (result.float() for result in results)

        return _in_steps(rows, memory, compute, every=every)

    def _look_at_states(self, before: SizesOfTensors, number: int, states: States, part: Part) -> None:
        """Learn the size of states from a piece that continues a sequence. before, number: of the shape before it."""
        now = states.bytes_of(part.seq_id, part.end)
        self.grows = self.grows or now != before
        self._varies = self._varies or states.shape_number(part.seq_id, part.end) != number
        count = len(part.ids)
        if self.grows:
            growth = {device: sum(sizes) - sum(before.get(device, [])) for device, sizes in now.items()}
            self.bytes_per_token = {device: size // count for device, size in growth.items()}
        self.state_bytes = {
            device: max(sum(sizes) - part.end * self.bytes_per_token.get(device, 0), 0) for device, sizes in now.items()
        }
        self.tensor_bytes = {device: max(sizes) for device, sizes in now.items()}
