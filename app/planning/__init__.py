"""Planning. The planner and what it needs are pure functions; `inputs.py`, `batch_size.py`,
`recommendation_inputs.py`, `recommendation_routes.py` and `job_advice.py` read the database.
"""
