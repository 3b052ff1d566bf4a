"""What a failure tells beside its sentence: where, from which shapes, and how they came about."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchdebug_magics.instruments.shapes.forward_table import examine_model

if TYPE_CHECKING:
    from torchdebug_magics.instruments.shapes.report import Failure


def broken(model: nn.Module, *inputs: Any, **keywords: Any) -> Failure:
    failure = examine_model(model, *inputs, keywords=keywords).report.failure
    assert failure is not None
    return failure


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 16, 3), nn.MaxPool2d(2), nn.Linear(100, 10)

    def forward(self, image: Any) -> Any:
        h = self.pool(self.conv(image).relu())
        h = h.flatten(1)
        return self.fc(h)


def test_the_chain_leads_from_the_input_to_the_operand() -> None:
    failure = broken(Net(), torch.randn(2, 3, 14, 14))
    assert [(step.op, step.module, step.output_shape) for step in failure.chain] == [
        ("image", "", (2, 3, 14, 14)),
        ("conv2d", "conv", (2, 16, 12, 12)),
        ("relu", "", (2, 16, 12, 12)),
        ("max_pool2d", "pool", (2, 16, 6, 6)),
        ("flatten", "", (2, 576)),
    ]
    lines = [step.location.source for step in failure.chain if step.location is not None]
    assert lines == ["h = self.pool(self.conv(image).relu())"] * 3 + ["h = h.flatten(1)"]
    assert failure.chain[1].input_shapes == ((2, 3, 14, 14), (16, 3, 3, 3), (16,))


def test_where_and_with_what() -> None:
    failure = broken(Net(), torch.randn(2, 3, 14, 14))
    assert (failure.module, failure.op) == ("fc", "linear")
    assert failure.operand_shapes == ((2, 576), (10, 100), (10,))
    assert failure.operand_names == ("h", "fc.weight", "fc.bias")
    assert failure.location is not None
    assert failure.location.source == "return self.fc(h)"
    assert failure.error.startswith("RuntimeError: ")  # newer releases of torch name the op here
    assert failure.error.endswith("mat1 and mat2 shapes cannot be multiplied (2x576 and 100x10)")


def test_the_verdict_says_it_all_at_a_glance() -> None:
    report = examine_model(Net(), torch.randn(2, 3, 14, 14)).report
    assert report.verdict.startswith("`fc` expects 100 features, gets 576 = 16 x 6 x 6 from `conv` through `pool` · ")
    assert report.verdict.endswith("`return self.fc(h)` · verified fix: `fc = nn.Linear(576, 10)`")


def test_without_a_line_of_the_users_the_librarys_is_named_or_the_one_that_asked() -> None:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=100, max_position_embeddings=16, **small))
    failure = broken(model, input_ids=torch.randint(0, 100, (2, 20)))
    assert failure.location is not None
    assert failure.location.file.endswith("modeling_bert.py")
    assert failure.location.function == "forward"
    assert failure.explanation == "`input_ids` is 2 x 20, and the model has 16 positions (max_position_embeddings)"
    failure = broken(nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2)), torch.randn(3, 4))
    assert failure.location is not None
    assert failure.location.file == __file__
    assert failure.location.function == "broken"


def test_a_failure_in_a_helper_of_the_users_is_placed_there() -> None:
    def scores(q: Any, k: Any) -> Any:
        return q @ k

    class Attention(nn.Module):
        def forward(self, x: Any) -> Any:
            return scores(x, x)

    failure = broken(Attention(), torch.randn(2, 5, 8))
    assert failure.location is not None
    assert failure.location.function == "scores"
    assert failure.operand_names == ("q", "k")
    assert (failure.fixes[0].code, failure.fixes[0].verified) == ("q @ k.transpose(-2, -1)", True)


def test_an_error_that_was_caught_is_not_the_one_told() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(5, 2)

        def forward(self, x: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                self.first(x)
            return self.second(x)

    failure = broken(Net(), torch.randn(2, 4))
    assert failure.module == "second"
    assert failure.fixes[0].code == "second = nn.Linear(4, 2)"


def test_real_runs_are_explained_in_the_same_words() -> None:
    fake = broken(Net(), torch.randn(2, 3, 14, 14))
    real = examine_model(Net(), torch.randn(2, 3, 14, 14), real=True).report.failure
    assert real is not None
    assert (real.explanation, real.error, [fix.code for fix in real.fixes]) == (
        fake.explanation,
        fake.error,
        [fix.code for fix in fake.fixes],
    )


def test_hugging_face_masks_and_lengths() -> None:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=100, max_position_embeddings=16, **small))
    ids = torch.randint(0, 100, (2, 8))
    failure = broken(model, input_ids=ids, attention_mask=torch.ones(2, 7))
    assert "`attention_mask` is 2 x 7 beside `input_ids` of 2 x 8" in failure.explanation
    assert (failure.fixes[0].code, failure.fixes[0].verified) == ("attention_mask = torch.ones_like(input_ids)", True)
    failure = broken(model, input_ids=torch.randint(0, 100, (2, 20)))
    assert (failure.fixes[0].code, failure.fixes[0].verified) == ("input_ids = input_ids[:, :16]", True)
    failure = broken(model, input_ids=ids + 100)
    assert failure.explanation.startswith("`embeddings.word_embeddings` has 100 rows (0 to 99), gets index")
