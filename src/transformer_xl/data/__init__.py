"""Text -> tokens at rest -> segments. Uses numpy, knows no model and no torch.

recipes, sources, download   which text, from where, verified
tokenizers                   text <-> numbers
prepare, corpora, own_text   the text, once through, into a store
store                        tokens at rest: a folder with a manifest
lanes, sentences, evaluation_stream   a store, read again and again as segments
"""
