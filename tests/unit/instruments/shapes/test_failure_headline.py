"""An explanation in two: what the headline has room for, and the reason."""

import pytest

from torchdebug_magics.instruments.shapes.report import divided, fitted

PATH = "model.encoder.layers.11.attention.self.query_projection"


@pytest.mark.parametrize(
    ("explanation", "room", "parts"),
    [
        ("`fc` expects 3 features, gets 4", 70, ("`fc` expects 3 features, gets 4", "")),
        ("`fc` expects 3, gets 4: `flatten` merged the batch", 70, ("`fc` expects 3, gets 4", "`flatten` merged the batch")),
        ("`x[a: b]` selects position 3; it has 2", 70, ("`x[a: b]` selects position 3", "it has 2")),
        (
            "`classifier.fc1` expects 100 features, gets 576 = 16 x 6 x 6 from `features.conv` through `features.pool`",
            70,
            ("`classifier.fc1` expects 100 features, gets 576", "576 = 16 x 6 x 6 from `features.conv` through `features.pool`"),
        ),
        (
            "`classifier.fc1` expects 100 features, gets 576 = 16 x 6 x 6 from `features.conv`",
            55,
            ("`classifier.fc1` expects 100 features, gets 576", "576 = 16 x 6 x 6 from `features.conv`"),
        ),
        (
            "`classifier.fc1` expects 100 features, gets 8 x 576 from `features.convolution`: its channels are last",
            60,
            ("`classifier.fc1` expects 100 features, gets 8 x 576", "8 x 576 from `features.convolution`; its channels are last"),
        ),
    ],
)
def test_the_first_clause_is_the_headline(explanation, room, parts):
    assert divided(explanation, room) == parts


def test_names_give_room_to_shapes():
    explanation = "`q @ k` cannot multiply `query` of 2 x 4 x 5 x 8 by `key.flatten(1)` of 2 x 40 (from `conv`): 8 columns, 2 rows"
    assert divided(explanation, 60) == ("`q @ k` cannot multiply 2 x 4 x 5 x 8 by 2 x 40", explanation)


def test_a_clause_that_does_not_fit_stands_in_the_reason():
    explanation = "`embeddings.word_embeddings` has 100 rows, gets index 196 at `input_ids[1, 1]`"
    assert divided(explanation, 60) == ("`embeddings.word_embeddings` has 100 rows", explanation)


def test_a_name_that_is_too_long_is_shortened_and_stands_in_full_in_the_reason():
    explanation = f"`{PATH}` expects 768 features"
    headline, reason = divided(explanation, 60)
    assert headline == "`…ion.self.query_projection` expects 768 features"
    assert reason == explanation


@pytest.mark.parametrize("room", range(30, 90, 7))
def test_nothing_is_longer_than_the_room(room):
    code = "`torch.cat([some_tensor, another_tensor], dim=1).flatten(2)`"
    text = f"`{PATH}` gets {code} of 3 x 4 and many more words than a headline has room for"
    assert len(divided(text, room)[0]) <= room
    assert fitted(text, room).count("`") % 2 == 0
