"""Advantage estimators; `estimator_table` names them."""
