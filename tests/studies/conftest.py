"""What the studies' tests share: the minimal scale in place of tiny, no pictures of losses, and one finished ablation."""

from pathlib import Path

import pytest
from small_scale import MINIMAL

from transformer_xl.data.store import Store
from transformer_xl.studies.catalogue import run_study
from transformer_xl.training import loop


@pytest.fixture(autouse=True, scope="module")
def without_curves():
    """Drawing takes longer than training these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda run, unit: None)
        yield


@pytest.fixture(scope="session")
def finished(byte_store: Store, tmp_path_factory) -> Path:
    """The folder of a finished ablation-encoding of two seeds; read it, or add models that are not there."""
    out = tmp_path_factory.mktemp("study") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_curve", lambda run, unit: None)
        run_study("ablation-encoding", scale=MINIMAL, data=byte_store.folder, out=out)
    return out
