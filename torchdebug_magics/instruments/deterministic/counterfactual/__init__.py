"""Why would another run give other numbers? Runs in which exactly one thing is otherwise.

same start, same seeds -> other seeds -> settings off -> the state that the run before has left: `effect` compares each with the first run
to its end and says where a difference that reaches the results begins; `dependences` words it.
"""
