"""Every notebook runs from top to bottom on a real kernel of both stacks, and shows what it promises."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests import stacks
from tests.notebooks.runs import EXERCISES, FOLDER, NOTEBOOKS, code_cells, executed, run, verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbformat import NotebookNode

pytestmark = pytest.mark.kernel

WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURE = re.compile(r"base64,[A-Za-z0-9+/=]*")
LARGEST_OUTPUT = 100_000  # characters of HTML without its pictures: what GitHub and a mail still show


def shown(document: NotebookNode) -> Iterator[tuple[int, Any]]:
    """Every output that has data, by the number of its cell."""
    for number, cell in code_cells(document):
        for output in cell.outputs:
            if "data" in output:
                yield number, output.data


# An exercise runs here untouched, on the modern stack; `test_exercises.py` runs it solved, on the other one.
RUNS = {
    f"{path.relative_to(FOLDER).with_suffix('')}-{stack}": (path, stack)
    for path in NOTEBOOKS
    for stack in stacks.STACKS
    if stack == "modern" or path not in EXERCISES.values()
}


@pytest.fixture(scope="module", params=RUNS)
def document(request: pytest.FixtureRequest, kernels: None, tmp_path_factory: pytest.TempPathFactory) -> NotebookNode:
    path, stack = RUNS[request.param]
    folder = tmp_path_factory.mktemp("notebooks") / "copy"  # the other stack's run may write beside it at the same time
    shutil.copytree(FOLDER, folder)
    before = set(folder.rglob("*"))
    result = executed(folder / path.relative_to(FOLDER), stack)
    assert set(folder.rglob("*")) == before, "the notebook left files beside it"
    return result


# What the cells of a notebook promise, in the order in which they say it.
SENTENCES = {
    "ranks": (
        r"Rank 1 of 2: NaN from log in forward · step 2 · .* row 5 of 16, .* also rank 0 received it with the averaged gradients",
        r"^\(1, 'log', \(5,\), \[\(0, 'finished'\), \(1, 'finished'\)\]\)$",
        r"The weights of rank 1 part from rank 0's after 1 step, first head\.weight",
        r"^\('replicas_part',\s+1,\s+'head\.weight'",
        r"Ranks 0 and 1 drew the same batch at every step",
        r"^\('same_batch',\s+\(0, 1\),\s+'use DataLoader\(\) with sampler=DistributedSampler\(\)",
        r"rank 0 used [\d.]+ MiB where rank 1 used [\d.]+ MiB: [\d.]+ MiB more in .*'outputs'",
        r"^\('uneven_memory', \(0,\), 'outputs\.append\(out\.detach\(\)\)'\)$",
        r"All 2 ranks: No NaN or inf in 6 backward passes",
        r"^\(None, 6\)$",
    ),
    "00_tour": (
        r"`attend` expects 64 features, gets 32 from .* · .* fix `attend = nn\.Linear\(32, 1\)` · verified on a copy apply",
        r"Stopped by guard: .*scores.* keeps each iteration's graph \(\+[\d.]+ MiB each\) .* fix run the loop under `with torch\.no_grad\(\):`",
        r"only `scores` grows|no growth",
        r"nan, nan",
        r"NaN from _softmax in forward · step 23 .* a whole row is masked with -inf.* row 5",
        r"tensor\(\[(0, )+0\]\)",
        r"No NaN or inf in .* 17 optimizer steps",
        r"Different every run: .* `np\.random\.default_rng\(\)` has no seed",
        r"Same numbers twice: [\d,]+ ops are bit-identical",
        r"No NaN or inf",
        r"^\[(\d\.\d+, )+\d\.\d+\]$",
        r"Gradients and updates look healthy: 40 steps of \d+ modules",
        r"No NaN or inf in 10 backward passes",
    ),
    "memtrace": (
        r"Peak [\d.]+ MiB in the (forward|backward) pass · In\[\d+\] line \d+; no growth over 4 steps .* Held at the peak: activations [\d.]+ MiB, ",
        r"checkpointed peaks \d+% lower than plain: activations [\d.]+ (K|M)iB instead of [\d.]+ MiB",
        r"\] `losses` keeps each iteration's graph \(\+[\d.]+ MiB each\) · .* fix run the loop under `with torch\.no_grad\(\):`.* Path from `losses`",
        r"\] `losses` keeps each iteration's graph \(\+\d+ nodes each\) · .* fix write `losses\.append\(step\(\)\.detach\(\)\)`",
        r"\] `total` keeps each iteration's graph \(\+\d+ nodes each\) · .* fix write `total = .*\.detach\(\)`",
        r"\] `seen` grows by [\d.]+ KiB each iteration \(6 so far\) · .* kept by `seen\[0\]`",
        r"\] `cache` grows by [\d.]+ KiB each iteration \(6 so far\) · .*`cache\[key\] = .* fix bound the cache.* kept by `cache\[0\]`",
        r"\] `state` keeps each iteration's graph \(\+[\d.]+ (K|M)iB each\) · .* fix .*`state = .*\.detach\(\)`.* Path from `state`",
        r"\] Each run of this cell adds 4\.0 MiB to `kept`",
        r"reference cycles 6\.0 MiB: `Batch\.me`",
        r"at the marks: 1 before the forward [\d.]+ MiB, 2 before the backward [\d.]+ MiB, 3 after the backward",
        r"Stopped by guard at .* \(MEM_LIMIT of this server\) .* held by `history` [\d.]+ (K|M)iB",
        r"\d+ tensors",
        r"The error of In\[\d+\] holds [\d.]+ MiB fix `%memclean --free exception`",
        r"\] Freed exception [\d.]+ MiB",
        r"mem_0\.pickle with \d+ events",
        r"\] Process peak [\d.]+ (M|G)iB; no growth",
    ),
    "deterministic": (
        r"^usage: %%deterministic ",
        r"^4 steps, the last loss is [\d.]+$",  # once, though the cell ran twice
        r"Same numbers twice, but different when the cell runs again · .* line 14: .* this run changes `net`, `history`",
        r"^\(4, True, 42, True\)$",
        r"Seeded with 7; \d+ settings changed and restored",
        r"^\(True, False\)$",
        r"Seeded with 7, \d+ settings changed, until `%deterministic off`",
        r"^True$",
        r"none known to be seeded from entropy .* 7 by %deterministic",
        r"Seeded with 7; \d+ settings changed and restored",
        r"2 of \d+ random number generators are seeded from entropy, different in every run .*-> numpy\.random .*-> surprise",
        r"Nondeterministic op put_ · In\[\d+\] line 3: .* fix assign to the flat view `\.view\(-1\)` by index",
        r"Same numbers as before\.json: 11 ops are bit-identical",
        r"Different from before\.json: input from outside PyTorch · In\[\d+\] line 5: `return \(layer\(x\) \* scale\)",
        r"Same numbers as before\.json: 11 ops are equal to within 0\.0001",
        r"Different from well.* line 12: `loss = F\.cross_entropy\(net\(x\), y\)`",
        r"^'Same numbers twice, but different when the cell runs again",
        r"every run: unseeded torch generator · .* line 3: `noise\.seed\(\)` fix use `noise\.manual_seed\(42\)` .* draws from `noise`",
        r"every run: unseeded NumPy generator · .* line 8: .* `np\.random\.default_rng\(\)` has no seed",
        r"every run: the clock is read · .* line 2: .* `time\.perf_counter\(\)` reads the clock",
        r"every run: hashes or memory addresses are used · .* line 8: .* the iteration order of the set `groups` depends on object addresses",
        r"every run: uninitialized memory is read · .* line 2: .* fix use `torch\.zeros` .* reads uninitialized memory",
        r"every run: the runs took different branches · .* line [345]: .* (depends on `time\.perf_counter`|continued to its end, the second one to)",
        r"every run: the first run changed the input · .* line 2: .* the iterator `batches` could not be restored for the second run",
        r"every run: unseeded DataLoader workers · .* line 8: .* `np\.random\.default_rng\(\)` has no seed",
        r"Reproducible only with the seed set here · In\[\d+\] line 2: .* `randperm` draws from torch's generator, which is not seeded",
        r"different when the cell runs again · .* line 2: .* fix work on a copy, `images\.clone\(\)`.* this run changes `images`",
        r"^\[\('carried_state', 'In\[\d+\] line 2', 'work on a copy, `images\.clone\(\)`",
        r"Same numbers twice, but different when the cell runs again · .* line 14: ",
    ),
    "autograd": (
        r"^usage: %%autograd ",
        r"`h` was overwritten after `exp` saved it for backward · In\[\d+\] line 3: `h \+= 1`",
        r"^\('inplace', 'exp', 'add_', '`h = h \+ 1`'\)$",
        r"was overwritten after `sigmoid` saved it for backward · In\[\d+\] line 3: .* module 2",
        r"^\('2', 'use `ReLU\(inplace=False\)` for module `2`'\)$",
        r"`1\.weight` was overwritten after `addmm` saved it for backward · In\[\d+\] line 7: `optimizer\.step\(\)`",
        r"`hidden` carries the graph of the previous step into backward\(\) · In\[\d+\] line 9",
        r"^\('hidden', 'run `hidden = hidden\.detach\(\)` at the end of each step', 'In\[\d+\] line 6'\)$",
        r"Two backward calls share a part of the graph · .* line 5: .* replace both calls with `\(loss_left \+ loss_right\)\.backward\(\)`",
        r"`argmax` has no derivative: its output is an integer or a bool · In\[\d+\] line 3",
        r"`addmm` ran under `torch\.no_grad\(\)`: the loss has no graph · In\[\d+\] line 2: `with torch\.no_grad\(\):` .* move `out = net\(x\)` out of `torch\.no_grad\(\)`",
        r"In-place write to `weight`, a view of a leaf that requires grad · In\[\d+\] line 3",
        r"`loss` has shape \[32\], and backward\(\) needs a scalar · In\[\d+\] line 2: .* `loss = F\.cross_entropy\(net\(x\), y, reduction=\"mean\"\)`",
        r"`Scale\.backward` returns 1 gradient, but `forward` takes 2 inputs · In\[\d+\] line 10",
        r"`copy` was not used to compute the outputs · In\[\d+\] line 3",
        r"`1\.weight` was overwritten after `addmm` saved it for backward · In\[\d+\] line 7: `optimizer\.step\(\)`",
        r"^\('stale_value', True\)$",
        r"`codes` was overwritten after `sigmoid` saved it for backward · In\[\d+\] line 5: `codes\[codes < 0\.5\] = 0` .* gradient error +[\d.]+%",
        r"^\('stale_value', 'sigmoid', 'codes\[codes < 0\.5\] = 0'\)$",
        r"2 parameters get no gradient: a copy into a new tensor cuts the graph · In\[\d+\] line 9",
        r"^\(\('encoder\.weight', 'encoder\.bias'\), '`return self\.head\(h\)`'\)$",
        r"`optimizer` updates tensors that are no longer the model's · In\[\d+\] line 13",
        r"\d parameters get gradients, but no optimizer updates them .* nn\.ModuleList\(",
        r"The gradients were zeroed between backward\(\) and `optimizer\.step\(\)` · In\[\d+\] line 7",
        r"`softmax` is applied before `cross_entropy`, which applies it itself · In\[\d+\] line 3",
        r"`view` reads 32 x 10 x 8 as 10 x 32 x 8 in memory order · In\[\d+\] line 9",
        r"^\('scrambled', '`out, _ = self\.rnn\(x\.transpose\(0, 1\)\.reshape\(steps, batch, features\)\)`'\)$",
        r"No autograd fault: 5 backward passes, 5 optimizer steps checked",
        r"^\(False, 5\)$",
        r"The loss reaches 4 of 6 trainable tensors .* projector\.weight, projector\.bias",
        r"\('projector\.weight', False\), .* 'detach'\)$",
    ),
    "gradwatch": (
        r"^usage: %%gradwatch ",
        r"Gradients and updates look healthy: 192 steps of 3 modules, loss 1\.\d+ -> 0\.\d+",
        r"^\(False, 192, \('0', '2', '4'\), ",
        r"Training diverges from step 0 on: gradients grow [\d.e+]+x per step · In\[\d+\] line 3: `optimizer = torch\.optim\.SGD",
        r"^\('diverging', True, 'restart the training, and lower the learning rate from 1\.5 to ",
        r"Gradients vanish: at `0`, \de-\d+ of those at the output · In\[\d+\] line 6",
        r"^\('0', True, 'replace `nn\.Sigmoid\(\)` with `nn\.ReLU\(\)`",
        r"Gradient norm spike in step 31, batch 31 of epoch 0: [\d,]+x the usual · In\[\d+\] line 8",
        r"^\('exploding_spike', 31, 'clip: call `torch\.nn\.utils\.clip_grad_norm_",
        r"Zero gradients in `2` and 1 module before it from step 0 on · In\[\d+\] line 7",
        r"^\('2', \('0', '2'\), 1\.0\)$",
        r"Updates are too large: \d+% of the weight norm in `\d` · In\[\d+\] line 3",
        r"Weights of 3 modules change by at most \de-\d+ of their norm per update · In\[\d+\] line 3",
        r"^\('too_fast', 'not_learning', 'raise the learning rate from 1e-09",
        r"Weights of \d modules do not change: updates round to zero · In\[\d+\] line 7",
        r"^\('not_learning', 0\.0, 'convert the weights to float32",
        r"What is clipped, of norm [\d.e+]+, is still multiplied by the GradScaler · In\[\d+\] line 8",
        r"^\('clipped_always', 'call `scaler\.unscale_\(optimizer\)` before `nn\.utils\.clip_grad_norm_\(net\.parameters\(\), 1\.0\)`', 'nn\.utils\.clip_grad_norm_",
        r"The loss stays at 1\.386 = ln 4 \(guessing\) for 256 steps · In\[\d+\] line 9",
        r"^\('plateau_at_chance', 1\.386\)$",
        r"Gradients and updates look healthy: 64 steps of 2 modules",
        r"^step,module,grad_norm,update_ratio,zero_share,loss",
    ),
    "overfit": (
        r"^usage: %+overfit ",
        r"Step zero is kept: 6 parameters",
        r"The model overfits 8 samples: loss 1\.\d+ -> 0\.0\d+ in \d\d steps",
        r"^\(True, 1\.\d+, 0\.0\d+, \d\d\)$",
        r"After 0 steps no parameter has moved since step zero",
        r"The learning rate 1e-06 is too small .* with 0\.0\d+ the model learns the 8 samples .* learning rate x1000 +0\.\d+ +learns",
        r"^\('learning_rate', 1000\.0, True\)$",
        r"The model overfits 8 samples",
        r"`softmax` is applied twice .* `cross_entropy` expects logits .* stalls at +ln\(1 \+ 3/e\) = 0\.7437",
        r"^\('double_softmax', 'remove the `softmax` before `cross_entropy`', 0\.74\)$",
        r"3 parameters are frozen .* for `0\.weight`, `1\.weight`, `4\.weight` the model learns",
        r"^\('frozen', \('0\.weight', '1\.weight', '4\.weight'\)\)$",
        r"Rows 2, 5 are equal inputs with different labels",
        r"^\('conflicting_labels', \(2, 5\), \[2, 1\]\)$",
        r"Clipping shrinks the gradient norm from 1\.\d+ to 1e-05",
        r"^\('clipping', True\)$",
        r"Step zero is kept: 6 parameters",
        r"^The model overfits 8 samples",
        r"After 50 steps 6 of 6 parameters moved",
        r"^\(6, \(\)\)$",
    ),
    "stepzero": (
        r"^usage: %stepzero ",
        r"Step zero is kept: 9 parameters, buffers, .* elements\s+515 .* holds 0 B, 2\.1 KiB shared with the model",
        r"^\(0, 2196\)$",
        r"After 50 steps 4 of 9 parameters moved never moved `scale`: no gradient never moved `hidden\.weight`, `hidden\.bias`: not in the",
        r"^\{'scale': 'no gradient', 'encoder\.weight': 'frozen'",
        r"^\['norm\.running_mean', 'norm\.running_var', 'norm\.num_batches_tracked'\]$",
        r"Restored to step zero: 9 parameters, buffers, optimizer and random state",
        r"^True$",
        r"^\[\('encoder\.bias', 'something other than the optimizer writes to it'\)\]$",
        r"Step zero is dropped",
        r"Step zero is kept: 9 parameters, .* file\s+`?.*zero\.pt",
        r"After 50 steps 4 of 9 parameters moved",
    ),
    "shrink": (
        r"^usage: %shrink ",
        r"729K parameters became 230K · `transformer\.h` keeps layers 0 and 1 of 12 .* runs on fake tensors",
        r"^\(\{'transformer\.h': \(0, 1\)\}, 2, \[0, 1\]\)$",
        r"^torch\.Size\(\[2, 20\]\)$",
        r"Restored the original layers: 729K parameters .* `transformer\.h`",
        r"`model\.layers` keeps layers 0 and 3 of 24 .* runs on (fake|real) tensors",
        r"^\(2, \['linear_attention', 'full_attention'\], 4\)$",
        r"`encoder\.block` keeps layers 0 and 1 of 8 also `decoder\.block` keeps layers 0 and 1 of 6",
        r"70\.6G parameters became 3\.81G · `model\.layers` keeps layers 0 and 1 of 80 .* runs on meta tensors",
        r"keeps layers 0 and 1 of 80 also initialized on cpu",
        r"^tensor\(True\)$",
        r"keeps layers 0 to 5 of 12 also attention skipped in 5 layers",
        r"^\(5, \[\]\)$",
        r"Not shrunk: the model is unchanged why\s+its forward fails with 2 layers",
        r"^\(True, 'IndexError: index 7 is out of range', 12\)$",
        r"729K parameters became 230K",
        r"^\(2, 12\)$",
    ),
    "hangwatch": (
        r"^usage: %%hangwatch ",
        r"Finished in [\d.]+ s: no pause of 2 s or longer · [\d.]+ steps per second",
        r"^\('finished', None, True\)$",
        r"Stuck: DataLoader worker 1 waits for a lock that it holds itself · .* line 11: .* -> worker 1 \(batch 1, pid \d+\) -> lock, acquired at .* line 17",
        r"^stuck self_deadlock worker 1 In\[\d+\] line 11 main +batch +waits for worker 1: batch 1",
        r"Stuck: DataLoader worker 0 has stopped in a debugger · .* line (9|10): .* `num_workers=0`",
        r"Stuck: the main thread waits in queue\.get\(\) · .* line 11: .* sentinel .* nobody is left to put an item",
        r"Stuck: process evaluation waits for its parent's OpenMP threads · .* line 8: .* `torch\.set_num_threads\(1\)`",
        r"Stuck: rank 1 calls barrier #4 where rank 0 calls all_reduce #4 \[1\] · .* line 9: .* rank 0 all_reduce #4 \[1\] rank 1 In\[\d+\] line 8",
        r"Stuck: rank 1 has run out of batches · .* `with model\.join\(\):`.* rank 0 waits for it in backward \(all_reduce #11 \[5\]\)",
        r"Stuck: thread (saver and thread reporter|reporter and thread saver) wait for each other · .* line (8|15): .* in the same order",
        r"Slow: `hidden` keeps the graphs of earlier steps · .* line 9: .* `hidden = hidden\.detach\(\)`",
        r"Slow: the main thread sleeps in time\.sleep\(4\) · .* line 4: `time\.sleep\(4\)`",
        r"Slow: the main thread sleeps in time\.sleep\(4\) · .* line 1: `time\.sleep\(4\)`",
        r"^the main thread \(pid \d+\) .* thread saver \(pid \d+\) waits for lock -> thread reporter",
    ),
}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(run, marks=[pytest.mark.waits] if run.startswith("hangwatch-") else [])
        for run in RUNS
        if run.rpartition("-")[0] in SENTENCES
    ],
    indirect=True,
    scope="module",
)
def test_a_notebook_says_what_it_promises(document: NotebookNode, request: pytest.FixtureRequest) -> None:
    outputs = [output for _, cell in code_cells(document) for output in cell.outputs]
    texts = [output.data.get("text/plain", "") if "data" in output else output.get("text", "") for output in outputs]
    said = [" ".join(text.split()) for text in texts]
    for sentence in SENTENCES[request.node.callspec.params["document"].rpartition("-")[0]]:
        at = next((at for at, text in enumerate(said) if re.search(sentence, text)), None)
        assert at is not None, f"{sentence!r} is not in what follows: {[text[:150] for text in said]}"
        said = said[at + 1 :]


def test_there_is_a_tour() -> None:
    assert FOLDER / "00_tour.ipynb" in NOTEBOOKS


def test_a_cell_that_is_to_fail_fails(document: NotebookNode) -> None:
    for number, cell in code_cells(document):
        fails = any(output.output_type == "error" for output in cell.outputs)
        tags = cell.metadata.get("tags", ())
        assert fails == ("raises-exception" in tags and "once-solved" not in tags), f"cell {number}"


def test_each_check_of_an_untouched_exercise_says_what_is_missing(document: NotebookNode) -> None:
    said = verdicts(document)
    for number, sentence in enumerate(said, 1):
        task = number if number < len(said) else 1  # the last one looks at all, and begins with the first
        assert re.fullmatch(rf"○ Task {task}: [^\n]{{20,220}}[.?]", sentence), sentence


def test_no_live_widget_is_left(document: NotebookNode) -> None:
    """In a saved notebook it would say "Error displaying widget"; ``-w`` asks for one all the same."""
    asks = re.compile(r"(^|\s)(-w|--widget)\b|ipywidgets")
    asked = {number for number, cell in code_cells(document) if asks.search(cell.source)}
    assert [number for number, data in shown(document) if WIDGET in data and number not in asked] == []
    assert "widgets" not in document.metadata


def test_every_html_output_can_also_be_read_as_text(document: NotebookNode) -> None:
    assert [number for number, data in shown(document) if data.get("text/html") and not data.get("text/plain")] == []


def test_outputs_stay_small(document: NotebookNode) -> None:
    sizes = {number: len(PICTURE.sub("", data.get("text/html", ""))) for number, data in shown(document)}
    assert {number: size for number, size in sizes.items() if size > LARGEST_OUTPUT} == {}


def test_nothing_of_ours_is_written_to_stderr(document: NotebookNode) -> None:
    said = [output.text for _, cell in code_cells(document) for output in cell.outputs if output.get("name") == "stderr"]
    assert [text for text in said if "torchdebug" in text or "Traceback" in text] == []


def test_a_failing_cell_fails_the_run_and_the_stacks_are_what_they_are_called(kernels: None, tmp_path: Path) -> None:
    """The checks above rest on this."""
    from nbclient.exceptions import CellExecutionError

    source = "import IPython, ipykernel, ipywidgets\nprint(IPython.__version__, ipykernel.__version__, ipywidgets.__version__)"
    said = {}
    for stack in stacks.STACKS:
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("1 / 0")])
        with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
            run(document, tmp_path, stack)
        said[stack] = document.cells[0].outputs[0].text.split()
    assert said["colab"] == ["7.34.0", "6.17.1", "7.7.1"]
    assert [int(version.partition(".")[0]) for version in said["modern"]] >= [9, 7, 8]


def test_the_page_of_a_tour_shows_every_output_and_a_failure_is_one(root: Path, tmp_path: Path) -> None:
    cells = [nbformat.v4.new_code_cell("print(6 * 7)"), nbformat.v4.new_code_cell("raise LookupError('planted')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "short.ipynb")
    command = [sys.executable, str(root / "tools/execute_notebook.py"), str(tmp_path / "short.ipynb"), str(tmp_path / "made/short.html")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    assert "planted" in ran.stderr
    assert "WARNING" not in ran.stderr
    page = (tmp_path / "made/short.html").read_text(encoding="utf-8")
    assert "42" in page
    assert "LookupError" in page
