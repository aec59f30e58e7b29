"""Token-exact sessions for agents: a conversation over HTTP becomes the rows that are trained.

history.py    the tree of sampled turns: where a request attaches, what a commit adds
assembly.py   leaves of a tree -> token columns, every sampled turn in exactly one of them
messages.py   OpenAI's chat completions in and out
live.py       one session: request -> what to sample -> answer
door.py       the engine, from other threads
server.py     the HTTP server, in a thread of its own
agents.py     a sample = a session and a run of the recipe's agent
"""
