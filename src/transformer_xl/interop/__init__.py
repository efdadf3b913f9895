"""Other people's checkpoints, in and out. A pickle is a program, so files of strangers are read in a process of its own, which has no torch and little
memory and time:

    our process                                     | the child: quarantine/
                                                    |
    importing    the door in                        |
    sources      which files belong together        |
    asking       starts the child   request.json   -|->  child         limits itself, copies numbers out
                                                    |    torch_files   where things lie in what torch.save wrote
                                                    |    pickles       a pickle read without running it
                                                    |    stand_ins     the names it may use, and what stands for them
                                                    |    extraction    what of all that is a model, words, momenta
                                                    |    tensor_bundle TensorFlow's index and data, in place of the four
                 ROLE.json, ROLE.safetensors       <|-
    formats/     what it means in our terms         |
    importing    a run folder                       |
    exporting    the door out, no child needed      |

One word for each thing that comes of a file: its `Contents` (facts and tensors, on both sides of the line), the `ForeignModel` and
`ForeignVocabulary` that they mean in our terms, and, once a run is made of these, what was `Imported`.
"""
