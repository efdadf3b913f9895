"""Where the host may wait for a device, each with its reason. A wait anywhere else fails `test_device_walk.py`; so does an entry that nothing needs."""

PER_TRAINING_STEP = 1
"""Of one micro-batch on one device, whatever waits: the host queues the next step while the device computes this one."""

ALLOWED = {
    # Weights and states go to the device or come from it: once.
    "checkpoint/folder.py load_checkpoint": "a model is put where it will be used",
    "tensor_files.py write_tensors": "a file is written",
    "inference/reader.py _saved_tensors": "what was read from a file is put where the model is",
    "interop/exporting.py _weights": "a file is written",
    "interop/formats/onnx_graph.py write_graph": "the graph is traced on a processor",
    "interop/formats/onnx_graph.py check_graph": "two programs' numbers are compared",
    "model/adapters.py _sum": "an adapter is merged in float64, on a processor, so that the sum is the same everywhere",
    "model/memory.py Memory.to": "a memory is moved",
    "training/session.py Session.fresh": "a new model is put on its device",
    "training/session.py Session.restore": "a saved session is put on its device",
    "training/gains.py measure_gains": "the old model is put beside the new one",
    # Somebody wants the numbers themselves: once for each piece of text, however many lanes.
    "evaluation/scoring.py _numbers": "losses of a segment",
    "evaluation/lines.py LineScorer._scores": "losses of a line",
    "library.py Loaded._scored": "losses of a piece",
    "batching/reading.py scored": "losses of a piece",
    "inference/reader.py Reader.score": "whether all losses are numbers, before anybody is told one",
    "decoding/distribution.py _log_softmax": "the host draws the next tokens, of all lanes at once",
    "inference/windows.py WindowReader._read": "a model without memory has its last tokens on the host and reads them again",
    "serving/api/models.py Served._prove": "whether a model answers at all",
    "analysis/attention.py average_attention.record": "sums of what each head looks at",
    "analysis/attention.py _rows.record": "what one head looks at",
    "analysis/contexts.py _score": "losses of many starts",
    "analysis/terms.py Scores.probability": "whether a mask is needed; by a slow formula anyway",
    "analysis/terms.py scores_by_distance": "whether a mask is needed; by a slow formula anyway",
    # How many members a cluster has, where nobody has counted them on the host: reading, not training.
    "model/vocabulary.py Vocabulary._found_places": "the size of a cluster",
    # A checkpoint.
    "training/saving.py kept": "weights and states come to the host, to be written beside training",
    # A training step: one, when the next is already queued.
    "training/travelling.py Coming.read": "the losses and the norm of the step before",
}
