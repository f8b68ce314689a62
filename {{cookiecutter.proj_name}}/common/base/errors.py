"""User errors, as opposed to bugs."""


class UserError(ValueError):
    """A mistake the user can fix: printed as is, without a traceback.

    The message names the value, the rule it broke, and what to do. Not a `KeyError`: that type prints its text quoted.
    """
