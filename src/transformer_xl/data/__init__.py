"""Text -> tokens at rest -> segments. Uses numpy, knows no model and no torch.

    corpora     feeding      text into a store              a store, read again and again as segments
          \\     /
           store             tokens at rest: a folder with a manifest
             |
            text             text <-> numbers

One word per idea for a run of text, from the disk to the model:

    block       what one read brings, anywhere in the bytes
    part        a range of one source that belongs to one split
    piece       what is encoded at once, cut where its tokenizer would cut too
    segment     what a model is fed: some tokens of every lane
"""
