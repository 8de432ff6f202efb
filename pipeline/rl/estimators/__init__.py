"""Advantage estimators; `estimator_table` lists them."""
