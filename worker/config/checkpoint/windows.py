"""The fields of config.json that say which layers see a window of keys only. Free of torch."""

from collections.abc import Collection

from worker.config.checkpoint.families import Family
from worker.config.checkpoint.fields import Fields, is_list
from worker.config.checkpoint.refusals import DENSE, window_remedy

# In `layer_types`.
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"


def read_windows(fields: Fields, family: Family) -> tuple[int, ...]:
    """The window of each layer, in tokens; 0: it sees all keys. (): no layer has one.

    Raises UserError for layers that are not as many as the model has, Unsupported for layers of
    other types, and for windows of an architecture that has none.
    """
    count, rule = fields.integer("num_hidden_layers"), family.windows
    if rule == "":
        refuse_windows(fields, fields.integer("max_position_embeddings"))
        return ()
    window = fields.integer("sliding_window", default=0, least=0)
    refuse_other_kinds(fields, {FULL, SLIDING}, window)
    if not window or (rule == "flag" and not fields.flag("use_sliding_window")):
        return ()
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not is_list(kinds) or len(kinds) != count:
            problem = f"must name {FULL} or {SLIDING} for each of {count} layers, not {kinds!r}"
            raise fields.error("layer_types", problem)
        slides = [kind == SLIDING for kind in kinds]
    elif rule == "flag":
        first = fields.integer("max_window_layers", default=28, least=0)
        slides = [i >= first for i in range(count)]
    elif isinstance(rule, int):
        name, every = "sliding_window_pattern", fields.get("sliding_window_pattern")
        is_text = isinstance(every, str) and every  # as "LLLG"
        every = len(every) if is_text else fields.integer(name, default=rule)
        slides = [(i + 1) % every != 0 for i in range(count)]
    else:
        slides = [True] * count
    return tuple(window * each for each in slides) if any(slides) else ()


def refuse_other_kinds(fields: Fields, known: Collection[str], window: int) -> None:
    """Refuse layers of other types than `known`."""
    kinds = fields.get("layer_types")
    if others := {*map(str, kinds if is_list(kinds) else ())} - {*known}:
        remedy = window_remedy(window) if others == {SLIDING} else DENSE
        problem = f"layers of type {', '.join(sorted(others))}"
        raise fields.unsupported("layer_types", problem, remedy)


def refuse_windows(fields: Fields, longest: int = 0) -> None:
    """Refuse windows of fewer tokens than `longest`, of an architecture or a drafter without."""
    window = fields.integer("sliding_window", default=0, least=0)
    sees_all = 0 < longest <= window
    refuse_other_kinds(fields, {FULL, SLIDING} if sees_all else {FULL}, window)
    slides = fields.flag("use_sliding_window") and (window or not longest)
    if fields.get("layer_types") is None and slides and not sees_all:
        raise fields.unsupported(
            "use_sliding_window", "sliding-window attention", window_remedy(window)
        )
