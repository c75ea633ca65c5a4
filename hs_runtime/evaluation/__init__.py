"""`hs-runtime eval`: what a policy costs in answers, measured through the engine that serves them.

Cases (teacher-forced sequences) and questions (free answers) go to one engine process for each set
of server constants. Inside its scheduler a tap forces the next token and reduces full logits, so
that only a few numbers a token leave the process. `hs-runtime serve` has no way to switch it on.
"""
