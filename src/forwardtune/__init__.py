"""Fine-tune deep models with forward passes only."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from forwardtune._public import *  # noqa: F403
    from forwardtune._public import Decision as Stand  # noqa: F401
    from forwardtune._public import __version__ as __version__
else:

    def __getattr__(name: str) -> object:
        """Loads the public names, and torch with them, at the first use of one: `forwardtune --help` needs none."""
        import forwardtune._public as public
        from forwardtune.errors import deprecated_names

        globals().update({each: getattr(public, each) for each in ("__all__", "__version__", *public.__all__)})
        return globals().get(name) or deprecated_names(__name__, Stand=public.Decision)(name)

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *globals()})
