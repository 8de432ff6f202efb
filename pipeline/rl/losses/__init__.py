"""Policy losses, and how losses of tokens become one number; `loss_table` names them."""
