"""A place in the Hugging Face ecosystem: importing this makes transformers' Auto classes, `generate()`, pipelines and `Trainer` know our runs.

    import transformer_xl.huggingface
    AutoModelForCausalLM.from_pretrained("runs/first")

The only module here whose import does something, for that is what it is for.
"""

from importlib.util import find_spec

from transformer_xl.errors import MissingPackage

if find_spec("transformers") is None:
    raise MissingPackage(
        "transformer_xl.huggingface needs transformers; install it with: pip install 'transformer-xl[hf]'"
    )

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from transformer_xl.huggingface.configuration import TransformerXLConfig
from transformer_xl.huggingface.modeling import TransformerXLForCausalLM
from transformer_xl.huggingface.tokenization import TransformerXLTokenizer

AutoConfig.register(TransformerXLConfig.model_type, TransformerXLConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLConfig, TransformerXLForCausalLM, exist_ok=True)
AutoTokenizer.register(TransformerXLConfig, slow_tokenizer_class=TransformerXLTokenizer, exist_ok=True)

__all__ = ["TransformerXLConfig", "TransformerXLForCausalLM", "TransformerXLTokenizer"]
