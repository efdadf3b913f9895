"""Where the extra `hf` is not installed, one sentence says so and how to get it."""

import importlib
import importlib.util
import sys

import pytest

from transformer_xl.errors import MissingPackage


@pytest.mark.parametrize(("module", "package"), [("huggingface", "transformers"), ("lm_eval", "lm_eval")])
def test_the_missing_package_is_named_with_its_extra(module, package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    monkeypatch.delitem(sys.modules, f"transformer_xl.{module}", raising=False)
    with pytest.raises(MissingPackage, match=r"pip install 'transformer-xl\[hf\]'"):
        importlib.import_module(f"transformer_xl.{module}")
