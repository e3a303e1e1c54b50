"""`kvctl plan`: how much memory sessions need, without a daemon."""

from argparse import Namespace

from kvd.spec import KVSpec
from kvd_client.cli.models import ModelGeometry, load_model
from kvd_client.cli.output import Document, Output
from kvd_client.cli.plan import POLICY_KINDS, Demand, Memory, PolicyPlan, make_policy, plan
from kvd_client.cli.screen import Screen, Table, labelled, wrap
from kvd_client.cli.sizes import show_bytes

PLAN_TABLE = Table(
    ("policy", "tokens_kept", "session_bytes", "total_bytes", "dense_percent", "sessions_fit", "settings"),
    elastic=("settings",),
)


def run(args: Namespace, output: Output) -> int:
    """Raises InvalidArgumentError on a model without KV heads and on values out of range."""
    model = load_model(args.model)
    spec = plan_spec(model, args.dtype or model.dtype, args.block_size)
    demand = Demand(spec, model.query_heads, args.context, args.sessions)
    memory = None if args.memory is None else Memory(*args.memory)
    kinds = list(POLICY_KINDS) if args.policy == "all" else [args.policy]
    policies = [(kind, make_policy(kind, args.keep, args.window, args.sinks)) for kind in kinds]
    rows = plan(policies, demand, memory)
    document = _document(model, demand, memory, rows)
    output.show(document, _page(model, demand, memory, document, output.screen))
    return 1 if all(row.refused for row in rows) else 0


def plan_spec(model: ModelGeometry, dtype: str, block_size: int) -> KVSpec:
    """The model's KV geometry. Raises InvalidArgumentError on values outside kvd's limits."""
    return KVSpec(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim_k=model.head_dim_k,
        head_dim_v=model.head_dim_v,
        dtype=dtype,
        block_size=block_size,
    )


def _document(
    model: ModelGeometry, demand: Demand, memory: Memory | None, rows: list[PolicyPlan]
) -> Document:
    spec = demand.spec
    return {
        "model": model.name,
        "layers": spec.layers,
        "query_heads": demand.query_heads,
        "kv_heads": spec.kv_heads,
        "head_dim_k": spec.head_dim_k,
        "head_dim_v": spec.head_dim_v,
        "dtype": spec.dtype,
        "block_size": spec.block_size,
        "block_bytes": spec.block_bytes,
        "token_bytes": spec.token_bytes,
        "context_tokens": demand.context_tokens,
        "sessions": demand.sessions,
        "session_blocks": demand.session_blocks,
        "session_bytes": demand.session_bytes,
        "total_bytes": demand.session_bytes * demand.sessions,
        "query_head_factor": demand.query_head_factor,
        "memory": None
        if memory is None
        else {"devices": memory.devices, "device_bytes": memory.device_bytes},
        "notes": list(model.notes),
        "policies": [_policy_record(row) for row in rows],
    }


def _policy_record(row: PolicyPlan) -> Document:
    refused = bool(row.refused)
    return {
        "policy": row.kind,
        "tokens_kept": None if refused else row.tokens_kept,
        "session_blocks": None if refused else row.session_blocks,
        "session_bytes": None if refused else row.session_bytes,
        "total_bytes": None if refused else row.total_bytes,
        "dense_percent": None if refused else round(row.dense_percent, 3),
        "sessions_fit": None if refused else row.sessions_fit,
        "settings": str(row.policy),
        "refused": row.refused or None,
    }


def _page(
    model: ModelGeometry, demand: Demand, memory: Memory | None, document: Document, screen: Screen
) -> list[str]:
    lines = [*_formula(model, demand, screen), ""]
    table = PLAN_TABLE if memory is not None else PLAN_TABLE.without("sessions_fit")
    lines += table.lines(document["policies"], screen)
    refusals = [row for row in document["policies"] if row["refused"]]
    for row in refusals:
        lines += ["", *wrap(f"{row['policy']} is refused: {row['refused']}", screen.width)]
    if memory is not None:
        lines += ["", *wrap(_fit_note(demand, memory), screen.width)]
    return lines


def _formula(model: ModelGeometry, demand: Demand, screen: Screen) -> list[str]:
    spec = demand.spec
    dims = f"({spec.head_dim_k} K + {spec.head_dim_v} V)"
    size = _plural(spec.element_bytes, "byte")
    product = f"{spec.layers} layers x {spec.kv_heads} KV heads x {dims} x {size}"
    blocks = f"{_plural(demand.session_blocks, 'block')} of {spec.block_size}"
    total = show_bytes(demand.session_bytes * demand.sessions)
    rows = [
        ("token  ", f"{show_bytes(spec.token_bytes)} = {product}, {spec.dtype}"),
        ("session", f"{show_bytes(demand.session_bytes)} = {demand.context_tokens:,} tokens in {blocks}"),
        ("total  ", f"{total} for {_plural(demand.sessions, 'session')}"),
    ]
    lines = [screen.paint(model.name, "bold")]
    for label, text in rows:
        lines += labelled(label, text, screen, screen.width, "  ")
    if demand.query_head_factor > 1:
        lines += ["", *wrap(_folklore(demand), screen.width)]
    for text in model.notes:
        lines += ["", *wrap(f"note: {text}", screen.width)]
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _folklore(demand: Demand) -> str:
    factor = demand.query_head_factor
    wrong = show_bytes(round(demand.session_bytes * factor))
    return (
        f"A figure of {wrong} per session counts all {demand.query_heads} query heads; this model caches "
        f"{demand.spec.kv_heads} KV heads, so that is {factor:g} times too much."
    )


def _fit_note(demand: Demand, memory: Memory) -> str:
    spec = memory.device_spec(demand.spec)
    split = "" if memory.devices == 1 else f", {spec.kv_heads} of {demand.spec.kv_heads} KV heads on each"
    size = (
        f"{memory.devices} x {show_bytes(memory.device_bytes)}" if split else show_bytes(memory.device_bytes)
    )
    return (
        f"sessions_fit: in {size} for KV alone{split}, less the null block and "
        f"the scratch reserve, while the newest session is prefilled dense and compressed after."
    )
