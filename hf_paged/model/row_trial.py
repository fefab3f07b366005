"""Finds by trying how a model computes rows: which may share a forward, and whether attention reads block tables.

A trial runs the model on a few tokens and compares logits with those of each sequence alone, and these with those of
generate. A model that derives positions from the length of the cache, for example, gives other logits with padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from transformers import GenerationConfig

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.cache.states import SizesOfTensors, States
from hf_paged.errors import UnsupportedModelError, raise_mistake
from hf_paged.integration.attention import OWN_MASK
from hf_paged.model.devices import device_of, is_offloaded
from hf_paged.model.foreign import foreign_code
from hf_paged.model.inputs import trial_ids
from hf_paged.model.overrides import Override
from hf_paged.model.packed import own_forward
from hf_paged.model.pieces import Part
from hf_paged.model.rows import RowModel, Rows, Together, Way
from hf_paged.model.state import Slot
from hf_paged.model.stood_in_for import without_modes
from hf_paged.model.support import SupportReport, difference, examine, first_line, logits_tolerance, rotary_limit

is_trying: ContextVar[bool] = ContextVar("hf_paged_trial", default=False)
"""True while a trial calls `generate`, so that the call is not paged even if paging is the default."""

_ways: Slot[tuple[object, Way | UnsupportedModelError]] = Slot("way to compute rows", is_released=False)


def way_of(model: Model, tried: Model | None = None) -> Way:
    """Tries the model on a few tokens, if it has changed. tried: the model, or its `bare_copy`.

    Raises UnsupportedModelError if sequences one by one give other logits than generate.
    """
    stamp, kept = examine(model).stamp, _ways.get(model)
    if kept is None or kept[0] != stamp:
        way: Way | UnsupportedModelError
        try:
            with device_of(model), without_modes():  # whatever the caller's default device is
                way = _try(model, model if tried is None else tried)
        except UnsupportedModelError as error:
            # An error of the trial, in which memory may have lacked: the next trial may not end so.
            if error.__cause__ is not None:
                raise
            way = error
        _ways.put(model, kept := (stamp, way))
    if isinstance(kept[1], UnsupportedModelError):
        raise kept[1]
    return kept[1]


def _try(model: Model, tried: Model) -> Way:
    trial = _Trial(model, tried)
    cache = Rows(model, PagedMemory(4)).cache
    # What a window of a dense view holds depends on when it is filled.
    windows = not trial.by_tables and any(isinstance(each, PagedLayer) and each.is_sliding for each in cache.layers)
    # Beyond the limit a prompt's first chunk has other rotary frequencies than the whole prompt.
    depends = trial.grows or windows or rotary_limit(model) is not None
    # A piece may be a single token, for which recurrent layers have a function of its own.
    resumes = not depends and (not cache.keeps_states or trial.splits_prompts(by_one=True))
    depends_on_split = not resumes or not trial.splits_prompts()
    no_prefixes, name = "", type(model).__name__
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


@torch.no_grad()
@without_modes()
def rows_that_differ(model: Model, tried: Model) -> int:
    """Return the least number of sequences tried in which the first gets other bits than alone; 0 if none has.

    Each sequence is computed token by token. tried: the model, or its `bare_copy`.
    """
    alone: torch.Tensor | None = None
    for count in _ROWS_TRIED:
        rows = bind_rows(model, PagedMemory(4, growable=True), tried)
        logits = []
        for start in range(_TOKENS_TRIED):
            rows.memory.append([(seq_id, 1) for seq_id in range(count)])
            parts = [Part(seq_id, [1 + (5 * start + seq_id) % 7], start) for seq_id in range(count)]
            logits.append(torch.stack(rows.forward(parts, tried=tried)))
        together = torch.cat(logits, dim=1)
        if alone is None:
            alone = together
        elif not together[:1].equal(alone):
            return count
    return 0


@torch.no_grad()
@without_modes()
def is_other_by_token(model: Model, tried: Model) -> bool:
    """Return True if a prompt's logits token by token differ from those at once by more than rounding explains."""
    ids, ends = [1 + (5 * place) % 7 for place in range(2 * _TOKENS_TRIED)], []
    for size in (len(ids), 1):
        rows = bind_rows(model, PagedMemory(4, growable=True), tried)
        for start in range(0, len(ids), size):
            rows.memory.append([(0, size)])
            (logits,) = rows.forward([Part(0, ids[start : start + size], start)], tried=tried)
        ends.append(logits[-1])
    whole, by_token = ends
    far = _FAR_IN_FP32 if whole.dtype == torch.float32 else _FAR_IN_HALF
    error, largest = difference(model.dtype, by_token, whole)
    return not error <= far * largest


_FAR_IN_FP32, _FAR_IN_HALF = 0.02, 0.25
"""Largest deviation, relative to the largest logit. (In half precision, routers of tiny models fall the other way.)"""


def _has_kv(model: Model) -> bool:
    """Return True if layers of the model's cache keep K/V of all tokens or of a window."""
    if not model._supports_default_dynamic_cache():
        return False
    return any(isinstance(layer, PagedLayer) for layer in PagedKVCache(model.config).layers)


_Cut = tuple[list[int], tuple[int, ...]]
"""Tokens, and the lengths of the pieces in which they are computed."""


class _Trial:
    """Runs a model on a few tokens. Raises UnsupportedModelError if sequences one by one give other logits than
    generate."""

    def __init__(self, model: Model, tried: Model) -> None:
        self._model = model
        self._tried = tried
        tokens, expected = self._generated()
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
        while not self._computes_alone(expected):
            self.by_tables = False

    def _computes_alone(self, expected: torch.Tensor) -> bool:
        """Return True if sequences one by one give these logits; without block tables, raise if they do not."""
        try:
            # Another sequence is computed between the pieces, to detect models that keep a state in their modules.
            self._alone = self._run([(self._long, (5, 1, 1)), (self._other, (5, 1, 1))], "one", "one")
        except Exception as error:  # of the model, or of what others have put into it
            raise_mistake(error)
            if self.by_tables:
                return False
            why = str(error) if isinstance(error, UnsupportedModelError) else first_line(error)
            raise self._unsupported(why) from error
        if self._close(self._alone[0], expected):
            return True
        if not self.by_tables:
            raise self._unsupported(f"its logits are {'NaN' if expected.isnan().any() else 'not those of generate'}")
        return False

    def _generated(self) -> tuple[list[int], torch.Tensor]:
        """Seven tokens, of which generate has added two, and the logits [3, vocab] from the fifth on."""
        ids = trial_ids(self._model, torch.arange(5, dtype=torch.int64, device=device_of(self._model))[None])
        without_defaults = copy.copy(self._tried)  # the modules are the same
        if (own := own_forward(self._tried)) is not None:
            vars(without_defaults)["forward"] = own
        # The model's own options may end the call early, or need more than a model, as stop strings do.
        without_defaults.generation_config = GenerationConfig()
        token = is_trying.set(True)
        try:
            plain = without_defaults.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=3,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        except Exception as error:  # of the model, or of what others have put into it
            raise_mistake(error)
            raise UnsupportedModelError(
                f"plain generate of {type(self._model).__name__} fails ({first_line(error)}); mend that first"
            ) from error
        finally:
            is_trying.reset(token)
        return plain.sequences[0, :7].tolist(), torch.cat(plain.logits).float()

    def splits_prompts(self, *, by_one: bool = False) -> bool:
        """Return True if a prompt in two pieces has the same logits as in one. by_one: the second piece token by token.

        A state that is lost at the cut changes the logits right after it most. These are rounded too, in low precision
        by more than the tolerance, but not by more than those of single tokens."""
        # 21 tokens, cut within a block, and with pieces of several lengths.
        tokens = [*self._long, *self._other, *self._long]
        rest = (1,) * 13 if by_one else (13,)
        try:
            (whole,) = self._run([(tokens, (20, 1))], "one", "one", every=True)
            (split,) = self._run([(tokens, (7, *rest, 1))], "one", "one", every=True)
        # Some models assert that a prompt is not split.
        except Exception as error:
            raise_mistake(error)
            return False
        if by_one:
            # By how much rounding alone differs, which the comparison of two pieces tolerates.
            self._noise, _ = difference(self._model.dtype, split[7:], whole[7:])
            return self._close(split[-2:], whole[-2:])
        return self._close(split[7:], whole[7:], self._noise)

    def together(self) -> tuple[Together, Together]:
        """Find the rows that may share a forward in which they begin, and a forward of the next token of each."""
        uneven: list[_Cut] = [(self._long, (5, 1, 1)), (self._short, (3, 1, 1))]
        even: list[_Cut] = [(self._long, (5, 1, 1)), (self._other, (5, 1, 1))]
        try:
            alone = [self._alone[0], *self._run(uneven[1:], "one", "one")]
        except Exception as error:  # what fails in a batch runs alone
            raise_mistake(error)
            return "one", "one"
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
        try:
            alone = [self._run([row], "one", "one")[0] for row in (long, other, short)]
        except Exception as error:  # what fails in a batch runs alone
            raise_mistake(error)
            return "one"
        if decodes == "any" and self._same([long, short], [alone[0], alone[2]], "one", "any"):
            return "any"
        return "equal" if decodes != "one" and self._same([long, other], alone[:2], "one", "equal") else "one"

    def _same(self, rows: list[_Cut], alone: list[torch.Tensor], prompts: Together, go_on: Together) -> bool:
        try:
            return all(map(self._close, self._run(rows, prompts, go_on), alone))
        except Exception as error:  # what fails in a batch runs alone
            raise_mistake(error)
            return False

    @torch.no_grad()
    def _run(self, rows: list[_Cut], prompts: Together, go_on: Together, *, every: bool = False) -> list[torch.Tensor]:
        """For each row the logits fp32 [number of pieces, vocab] after each of its pieces, or with `every` those after
        each of its tokens. prompts, go_on: "one" if the first, or the later pieces of the rows are a forward each."""
        memory = PagedMemory(4, growable=True)
        # New states and blocks for each run, so that no run finds what another one has left.
        computed = Rows(self._model, memory, by_tables=self.by_tables)
        logits: list[list[torch.Tensor]] = [[] for _ in rows]
        done = [0] * len(rows)
        for step in range(len(rows[0][1])):
            parts = []
            for number, (tokens, cuts) in enumerate(rows):
                end = done[number] + cuts[step]
                parts.append(Part(number, tokens[done[number] : end], done[number], cuts[step] if every else 1))
                memory.append([(number, cuts[step])])
                done[number] = end
            states = computed.states
            before = (
                (states.bytes_of(0, parts[0].start), states.shape_number(0, parts[0].start))
                if computed.has_states and step
                else None
            )
            batches = [[part] for part in parts] if (go_on if step else prompts) == "one" else [parts]
            results = [result for batch in batches for result in computed.compute(self._tried, batch)]
            if self.by_tables:
                computed.refuse_windows()
            if before is not None:
                self._look_at_states(*before, computed.states, parts[0])
            for own, result in zip(logits, results):
                own.append(result.float())
        return [torch.cat(own) for own in logits]

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

    def _close(self, left: torch.Tensor, right: torch.Tensor, noise: float = 0.0) -> bool:
        """noise: a difference that is tolerated in any case."""
        error, largest = difference(self._model.dtype, left, right)
        return error <= max(noise, logits_tolerance(self._model.dtype) * largest)

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self._model).__name__} cannot be computed one sequence at a time ({reason}); call generate"
        )
