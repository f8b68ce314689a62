"""What a user got wrong, as opposed to what we got wrong."""


class UserError(ValueError):
    """A mistake its reader can mend: printed as it stands, without a traceback.

    The message names the value, the rule it broke, and what to do. Not a `KeyError`: that type prints its text quoted.
    """
