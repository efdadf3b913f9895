"""What a model looks at, and what it makes of its context.

attention       where each head looks, on average, by term, and from single positions; its pictures, its page and its view for notebooks beside it
recording       how a model is made to tell
contexts        each token's loss, seen from exactly c tokens of context
recl            how much context is worth it, from such losses: the paper's Relative Effective Context Length
loss_files      those losses at rest, also of other people's models
recl_pictures   the figures of Appendix C
"""
