"""A file of byte pairs that would not give the bytes back is refused, whoever wrote it."""

import json

import pytest

from transformer_xl.data.text.tokenizers import load_tokenizer
from transformer_xl.errors import DataError


@pytest.fixture
def changed_pairs(pairs, tmp_path):
    """A change of the file of byte pairs -> what loading the tokenizer then says."""

    def load(change):
        pairs.tokenizer.save(tmp_path)
        found = json.loads((tmp_path / "bpe.json").read_text())
        change(found)
        (tmp_path / "bpe.json").write_text(json.dumps(found))
        with pytest.raises(DataError) as refused:
            load_tokenizer(tmp_path)
        return str(refused.value)

    return load


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("pre_tokenizer", {"add_prefix_space": True}, "its pre_tokenizer has add_prefix_space 'True'"),
        ("model", {"end_of_word_suffix": "</w>"}, "end_of_word_suffix '</w>'"),
        ("model", {"continuing_subword_prefix": "a"}, "continuing_subword_prefix 'a'"),
        ("model", {"dropout": 0.5}, "dropout '0.5'"),
        ("model", {"unk_token": "e"}, "unk_token 'e'"),
        ("model", {"merges": [["zz", "qq"]]}, "of tokens that it does not have"),
        ("model", {"merges": [7]}, "is no pair"),
        ("model", {"vocab": {"a": 1, "b": 3}}, "not numbered from 0 on"),
        ("model", {"vocab": []}, "no vocabulary"),
    ],
)
def test_byte_pairs_that_would_not_give_bytes_back_are_refused(changed_pairs, part, changes, told):
    assert told in changed_pairs(lambda found: found[part].update(changes))
