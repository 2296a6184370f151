from elaunch.checkpoint.retention.rule import Keep as Keep
from elaunch.errors import CheckpointError as CheckpointError
from elaunch.errors import CollectiveError as CollectiveError
from elaunch.errors import CollectiveTimeout as CollectiveTimeout
from elaunch.errors import ContextError as ContextError
from elaunch.errors import ElaunchError as ElaunchError
from elaunch.errors import MetricError as MetricError
from elaunch.errors import PeerLost as PeerLost
from elaunch.errors import PlacementError as PlacementError
from elaunch.errors import RunDirError as RunDirError
from elaunch.errors import SamplerError as SamplerError
from elaunch.errors import SaveError as SaveError
from elaunch.errors import ScriptError as ScriptError
from elaunch.training.checkpoint.state.perrank import PerRank as PerRank
from elaunch.training.checkpoint.state.perrank import rng_state as rng_state
from elaunch.training.context import Context as Context
from elaunch.training.context import init as init
from elaunch.training.distributed import DistributedContext as DistributedContext
from elaunch.training.place.info import Info as Info
from elaunch.training.place.info import info as info
from elaunch.training.place.info import latest_checkpoint as latest_checkpoint
from elaunch.training.recording import record as record
from elaunch.training.sampler import ElasticDistributedSampler as ElasticDistributedSampler

__version__: str
