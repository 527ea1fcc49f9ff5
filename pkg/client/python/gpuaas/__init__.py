"""The Python SDK of the GPUaaS hub: see Client."""

from .api_gen import *
from .client import Client as Client
from .client import Credential as Credential
from .client import ProblemError as ProblemError
from .client import ServiceAccountCredential as ServiceAccountCredential
from .client import UnreachableError as UnreachableError
from .client import WrongStatusError as WrongStatusError
