"""SOAP: Adam run in the eigenbasis of Shampoo's preconditioner."""

from .soap import SOAP

__all__ = ["SOAP"]
