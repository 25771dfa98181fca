"""What watching costs: every mode of the trace beside the plain pass, and two other tools beside theirs.

    python benchmarks/trace_cost.py [--rounds 15] [--clock wall] [--device cuda]

All sides of a case run in one process, interleaved; a figure is the ratio of two sides in one round. `no tap points` is
the same source with every call of a tap point taken out of the model and of the chunked delta rule, which is what
`off` (tap points and nobody there) is measured against. The watched sides are opened once, outside of the measured
time; what opening costs has a row of its own. transformers' DebugUnderflowOverflow and innards (PyPI) watch the same
checkpoint in transformers, and are measured against transformers without them: innards around `generate`, which is what
it watches, with the work of its background thread.

On a CPU: prefills of 512 and 2048 tokens and a decode of single tokens of the miniature; memory of a dump of 100,000
tokens of its gated delta rule layers. On a GPU also a full-width layer (hidden 2048, 16 and 32 heads of 128) captured
as a CUDA graph. The gate: watching changes no bit of the logits, and the dump stays under its cap.
Writes benchmarks/results/trace_cost.<hardware>.json.
"""

import argparse
import ast
import copy
import dataclasses
import inspect
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import workbench
import workbench.model
from workbench import bench, taps
from workbench.analysis.memory import peak_tensor_bytes
from workbench.config import ModelConfig
from workbench.errors import InputError, WorkbenchError
from workbench.kernels import Kernels
from workbench.kernels.gated_delta_rule import torch_chunk
from workbench.model import CausalLM
from workbench.taps import Tap
from workbench.tokenizer import Tokenizer
from workbench.tracing import Flags, Selection, trace
from workbench.tracing.dump import dump
from workbench.tracing.flags import FlagTap
from workbench.tracing.observer import tap_names
from workbench.training.corpus import read_documents

ROOT = Path(__file__).resolve().parent.parent
NAME = "trace_cost"

#: Sides of our own and what `trace` is opened with. The first column of a ratio is `off`.
MODES: dict[str, dict] = {
    "flags": {"check": "flags"},
    "flags, stages inside ops too": {"check": "flags", "inside": True},
    "sampled": {"check": "sampled"},
    "exact": {"check": "exact"},
    "statistics": {"check": "statistics"},
    "statistics, ops from outside": {"check": "statistics", "inside": False},
}
#: What a ratio must not exceed, by side, on prefills of the CPU.
TARGETS = {"off": 1.01, "flags": 1.05, "statistics": 2.0}


class _WithoutTaps(ast.NodeTransformer):
    """`observe(tap, name, x)` becomes x."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        return node.args[2] if name in ("observe", "taps.observe") else node


def without_taps(module: types.ModuleType) -> types.ModuleType:
    """The module with its tap points taken out of the source."""
    tree = ast.fix_missing_locations(_WithoutTaps().visit(ast.parse(inspect.getsource(module))))
    found = types.ModuleType(module.__name__ + "_without_taps")
    found.__file__ = module.__file__
    sys.modules[found.__name__] = found  # dataclasses look their module up
    exec(compile(tree, module.__file__, "exec"), found.__dict__)
    return found


class Sides:
    """The model of a checkpoint, its twin without tap points, and the taps of MODES."""

    def __init__(self, checkpoint: Path, device: str):
        self.model = workbench.load(checkpoint, dtype="float32", device=device)
        twin = without_taps(workbench.model).CausalLM(self.model.config).to(device).eval()
        twin.load_state_dict(self.model.state_dict())
        self.twin = twin
        self._evaluate, self._plain_evaluate = torch_chunk.evaluate, without_taps(torch_chunk).evaluate
        self.taps: dict[str, Tap | None] = {"off": None}
        for name, options in MODES.items():
            with trace(self.model, **options):
                self.taps[name] = self.model.tap
        self.names = ["no tap points", *self.taps]

    def run(self, side: str, call: Callable[[torch.nn.Module], object]) -> object:
        """`call(model)` with the tap of a side, up to the end of its work on the device."""
        if side == "no tap points":
            torch_chunk.evaluate = self._plain_evaluate
            found = call(self.twin)
            torch_chunk.evaluate = self._evaluate
        else:
            self.model.tap = self.taps[side]
            found = call(self.model)
            self.model.tap = None
        wait(self.model.device)
        return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_ids(checkpoint: Path, text: Path, count: int, device: str) -> Tensor:
    """The first `count` tokens of the documents, [1, count]."""
    tokenizer = Tokenizer.from_directory(checkpoint)
    ids: list[int] = []
    for document in read_documents(text):
        ids += tokenizer.encode(document.text)
        if len(ids) >= count:
            return torch.tensor([ids[:count]], device=device)
    raise InputError(f"{text}: expected at least {count} tokens, found {len(ids)}")


def rows_of(case: str, samples: dict[str, list[float]], base: dict[str, str], unit_scale: float, unit: str):
    """A row of the times of each side, and one of its ratio to the side `base` names, round by round."""
    rows = []
    for side, seconds in samples.items():
        rows.append(bench.Row.of(case, side, unit, [unit_scale * s for s in seconds]))
        if side in base:
            ratios = [a / b for a, b in zip(seconds, samples[base[side]], strict=True)]
            target = TARGETS.get(side) if case.startswith("prefill") else None
            said = [] if target is None else [f"target={target}"]
            rows.append(bench.Row.of(case, f"{side} / {base[side]}", "ratio of one round", ratios, attested=said))
    return rows


class Peers:
    """transformers with nobody watching, with DebugUnderflowOverflow, and with innards, on the same checkpoint."""

    def __init__(self, checkpoint: Path, device: str):
        import innards
        import transformers
        from transformers.debug_utils import DebugUnderflowOverflow

        def loaded() -> torch.nn.Module:
            peer = transformers.Qwen3_5MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().to(device)
            peer.generation_config.eos_token_id = None
            return peer

        self.plain, self.debugged, self.watched = loaded(), loaded(), loaded()
        self.debugger = DebugUnderflowOverflow(self.debugged)
        self.watch = innards.observe(self.watched, None, store=False)

    def generate(self, model: torch.nn.Module, ids: Tensor, count: int) -> object:
        mask = torch.ones_like(ids)
        found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        if model is self.watched:
            self.watch.wait()
        wait(ids.device)
        return found

    def forward(self, model: torch.nn.Module, ids: Tensor) -> object:
        found = model(ids, use_cache=False)
        wait(ids.device)
        return found


#: Sides of the peers and what they are compared with.
PEER_BASE = {
    "transformers, DebugUnderflowOverflow": "transformers", "transformers generate, innards": "transformers generate",
}  # fmt: skip


def prefill_rows(sides: Sides, peers: Peers | None, ids: Tensor, rounds: int, clock) -> list[bench.Row]:
    runs: dict[str, Callable[[], object]] = {
        side: lambda side=side: sides.run(side, lambda model: model(ids, use_cache=False)) for side in sides.names
    }
    if peers is not None:
        runs["transformers"] = lambda: peers.forward(peers.plain, ids)
        runs["transformers, DebugUnderflowOverflow"] = lambda: peers.forward(peers.debugged, ids)
        runs["transformers generate"] = lambda: peers.generate(peers.plain, ids, 1)
        runs["transformers generate, innards"] = lambda: peers.generate(peers.watched, ids, 1)
    samples = bench.interleave(runs, rounds=rounds, clock=clock)
    base = {"off": "no tap points", **dict.fromkeys(MODES, "off"), **(PEER_BASE if peers else {})}
    return rows_of(f"prefill of {ids.shape[1]} tokens", samples, base, 1e3, "ms")


def decode_rows(sides: Sides, peers: Peers | None, ids: Tensor, count: int, rounds: int, clock) -> list[bench.Row]:
    """`count` tokens one by one after a prompt, the rest of `ids`. Each run has a cache of its own, made before."""
    prompt, rest = ids[:, :-count], ids[:, -count:]

    def decode(model: CausalLM, cache: object) -> None:
        for t in range(count):
            cache = model(rest[:, t : t + 1], cache=cache).cache

    first = sides.model(prompt).cache
    fresh = {side: [copy.deepcopy(first) for _ in range(rounds + 2)] for side in sides.names}
    runs: dict[str, Callable[[], object]] = {
        side: lambda side=side: sides.run(side, lambda model: decode(model, fresh[side].pop())) for side in sides.names
    }
    if peers is not None:
        kept = {"transformers": [], "transformers, DebugUnderflowOverflow": []}
        for side in kept:
            cache = peers.plain(prompt, use_cache=True).past_key_values
            kept[side] = [copy.deepcopy(cache) for _ in range(rounds + 2)]

        def peer_decode(side: str, model: torch.nn.Module) -> None:
            cache = kept[side].pop()
            for t in range(count):
                model(rest[:, t : t + 1], past_key_values=cache, use_cache=True)
            wait(rest.device)

        models = {"transformers": peers.plain, "transformers, DebugUnderflowOverflow": peers.debugged}
        runs |= {side: lambda side=side, model=model: peer_decode(side, model) for side, model in models.items()}
        short = prompt[:, :8]
        runs["transformers generate"] = lambda: peers.generate(peers.plain, short, count)
        runs["transformers generate, innards"] = lambda: peers.generate(peers.watched, short, count)
    samples = bench.interleave(runs, rounds=rounds, clock=clock)
    base = {"off": "no tap points", **dict.fromkeys(MODES, "off"), **(PEER_BASE if peers else {})}
    return rows_of(f"decode after {prompt.shape[1]} tokens", samples, base, 1e3 / count, "ms per token")


def opening_rows(model: CausalLM, rounds: int, clock) -> list[bench.Row]:
    def opened(options: dict) -> None:
        with trace(model, **options):
            pass

    samples = bench.interleave(
        {name: lambda options=options: opened(options) for name, options in MODES.items()}, rounds=rounds, clock=clock
    )
    return [bench.Row.of("opening a trace", name, "ms", [1e3 * s for s in found]) for name, found in samples.items()]


def dump_rows(model: CausalLM, tokens: int, cap_bytes: int) -> tuple[list[bench.Row], float]:
    """Peak of tensors of the miniature's first gated delta rule layers, plain and dumped, and a share of the cap: the
    larger of what a dump adds to the peak and of what it writes; of tensors that ops take and give, and with the stages
    inside them, which come in blocks of chunks."""
    count = model.config.layer_types.index("full_attention")
    config = dataclasses.replace(
        model.config, num_hidden_layers=count, layer_types=model.config.layer_types[:count],
        mlp_types=model.config.mlp_types[:count], mtp_num_hidden_layers=0,
    )  # fmt: skip
    short = CausalLM(config).eval()
    short.load_state_dict({name: x for name, x in model.state_dict().items() if name in short.state_dict()})
    ids = torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        short(ids, use_cache=False, last_only=True)

    rows, worst = [], 0.0
    plain = peak_tensor_bytes(run)
    case = f"memory of {tokens} tokens in {count} gated delta rule layers, cap {cap_bytes} bytes"
    rows.append(bench.Row(case, "off", "peak bytes of tensors", float(plain), 0.0, 1))
    outside = Selection(tuple(f"*.{name}" for name in taps.LAYER_TAPS if name.startswith("gdn.")
                              and name not in taps.STAGES))  # fmt: skip
    for what, select in {"dump of gdn.*, ops from outside": outside, "dump of gdn.*": Selection(("*.gdn.*",))}.items():
        with tempfile.TemporaryDirectory() as folder:
            written: list = []

            def dumped(folder: str = folder, select: Selection = select, written: list = written) -> None:
                with dump(short, Path(folder) / "run", select=select, cap_bytes=cap_bytes) as writer:
                    run()
                written.append(writer)

            peak = peak_tensor_bytes(dumped)
            writer = written[-1]
        added = float(peak - plain)
        worst = max(worst, writer.written_bytes / cap_bytes, added / cap_bytes)
        said = [f"written={writer.written_bytes}", f"tensors={len(writer.entries)}", f"left out={len(writer.left_out)}"]
        rows.append(bench.Row(case, what, "peak bytes above off", added, 0.0, 1, attested=said))
    return rows, worst


def full_width() -> CausalLM:
    """One gated delta rule layer of the 35B model's width (hidden 2048, 16 and 32 heads of 128), random weights."""
    config = ModelConfig.from_hf({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 2048,
        "num_hidden_layers": 1, "max_position_embeddings": 8192, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "attention_dropout": 0.0, "layer_types": ["linear_attention"],
        "initializer_range": 0.02, "tie_word_embeddings": False, "intermediate_size": 512, "attn_output_gate": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    })  # fmt: skip
    model = CausalLM(config, Kernels({"gated_delta_rule": "torch_chunk"})).init_weights(0)
    return model.cuda().to(torch.bfloat16).eval()


def graph_rows(tokens: int, rounds: int, replays: int = 20) -> list[bench.Row]:
    """A captured pass of a full-width layer, replayed without and with flags."""
    model = full_width()
    ids = torch.randint(0, 64, (1, tokens), device="cuda")
    graphs, buffers = {}, []  # a graph writes where its buffers were: they must outlive it
    for side in ("off", "flags", "flags, stages inside ops too"):
        flags = Flags(tap_names(model), device="cuda")
        buffers.append(flags)
        model.tap = None if side == "off" else FlagTap(flags, None, inside=side != "flags")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        before = flags.steps_seen
        graphs[side] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[side]):
            model(ids, use_cache=False)
        graphs[side].replay()
        if side != "off" and (flags.steps_seen != before + 1 or flags.tripped()):
            raise InputError(f"{side}: expected one clean pass for a replay, found {flags.steps_seen - before}")
    model.tap = None

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()

    samples = bench.interleave(
        {side: lambda graph=graph: replay(graph) for side, graph in graphs.items()}, rounds=rounds
    )
    base = {side: "off" for side in graphs if side != "off"}
    case = f"captured full-width layer, {tokens} token{'' if tokens == 1 else 's'}, bfloat16, torch_chunk"
    return rows_of(case, samples, base, 1e3 / replays, "ms")


def correctness_of(sides: Sides, ids: Tensor) -> float:
    """Sides whose logits differ in a bit from those of `off`."""
    expected = sides.run("off", lambda model: model(ids).logits)
    return float(sum(
        not torch.equal(sides.run(side, lambda model: model(ids).logits), expected) for side in sides.names
    ))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "data" / "miniature")
    parser.add_argument("--text", type=Path, default=ROOT / "data" / "heldout.jsonl")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--decode", type=int, default=16, help="tokens decoded in a run")
    parser.add_argument("--dump-tokens", type=int, default=100_000)
    parser.add_argument("--cap", type=int, default=1 << 29, help="bytes of the dump's cap")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall",
                        help="processor: of all threads of the process, for a machine that others use")  # fmt: skip
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-peers", action="store_true", help="leave transformers and innards out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and arguments.clock != "wall":
        raise InputError("--clock processor: expected the CPU, which a GPU's time is not on")
    bench.pin_threads(1)
    keeps_memory = bench.keep_freed_memory()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    sides = Sides(arguments.checkpoint, arguments.device)
    count = max([*arguments.prefill, 128 + arguments.decode])
    ids = read_ids(arguments.checkpoint, arguments.text, count, arguments.device)
    differing = correctness_of(sides, ids[:, :200])
    bench.Correctness("sides whose logits differ", differing, 0.0).check()
    peers = None if arguments.without_peers else Peers(arguments.checkpoint, arguments.device)
    rows = []
    for tokens in arguments.prefill:
        rows += prefill_rows(sides, peers, ids[:, :tokens], arguments.rounds, clock)
    rows += decode_rows(sides, peers, ids[:, : 128 + arguments.decode], arguments.decode, arguments.rounds, clock)
    rows += opening_rows(sides.model, arguments.rounds, clock)
    share = 0.0
    if arguments.device == "cpu":
        more, share = dump_rows(sides.model, arguments.dump_tokens, arguments.cap)
        rows += more
    else:
        for tokens in (1, 512, 4096):
            rows += graph_rows(tokens, arguments.rounds)
    for row in rows:
        said = f"  {', '.join(row.attested)}" if row.attested else ""
        print(f"{row.case:60} {row.backend:55} {row.median:12.4f} {row.unit}, IQR {row.iqr:.4f}, n {row.n}{said}")
    correctness = bench.Correctness(
        "sides whose logits differ in a bit; largest share of its cap that a dump adds in memory or writes",
        max(differing, share), 1.0 if differing == 0.0 else 0.0,
    )  # fmt: skip
    path = bench.write_result(
        arguments.out, NAME, correctness, rows, project=ROOT, device=arguments.device,
        peers=() if peers is None else ("transformers", "innards"),
        conditions={"keeps_freed_memory": keeps_memory, "dtype": "float32", "clock": arguments.clock},
    )  # fmt: skip
    print(path)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        try:
            sys.exit(main())
        except WorkbenchError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
