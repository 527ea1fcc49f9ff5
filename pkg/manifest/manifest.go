// Package manifest is the app manifest, version 1: the signed document that describes an app and one release of it. It
// parses, validates, signs, verifies and lowers a manifest, and decides whether a workload is what its publisher
// allowed (Admits). Hub, node, command line and app teams share it. It is pure: no clock, no I/O, no logger; it knows
// no catalogue, no registry and no node.
package manifest

// Limits of a manifest and of what a tenant passes to it.
const (
	// MaxDocumentBytes is the size of a manifest document; a larger one is refused before it is parsed.
	MaxDocumentBytes = 256 << 10
	// MaxParametersBytes is the size of the parameters or of the config of one instance, as JSON.
	MaxParametersBytes = 64 << 10
	// MaxDepth is how deep a document may nest; a deeper one is refused.
	MaxDepth = 32
	// MaxAccelerators is how many accelerators one instance may have.
	MaxAccelerators = 64
	// MaxFields is how many bad fields one fault names; the rest is left out.
	MaxFields = 32
	// MinCPUMillis is the least that the kernel gives, MinMemoryMiB what it takes to start a container.
	MinCPUMillis = 10
	MinMemoryMiB = 8
)

// ServiceName is the name of the one service of a launchable_oci app.
const ServiceName = "main"

// Limits of the services of a docker_compose app.
const (
	// MaxFileBytes is the size of one file of a service.
	MaxFileBytes = 64 << 10
	// MaxFilesBytes is the size of all files of an app: the services stand in a document beside the manifest.
	MaxFilesBytes = 128 << 10
)

// Values of Variant.Accelerator.
const (
	AcceleratorNone   = "none"
	AcceleratorNVIDIA = "nvidia"
	AcceleratorAMD    = "amd"
)

// What an absent field means.
const (
	DefaultPidsMax                 = 1024
	DefaultStopGraceSeconds        = 10
	DefaultReadinessTimeoutSeconds = 120
	DefaultProbePeriodMillis       = 250
	DefaultProbeTimeoutMillis      = 2000
)

// The runtime backends that version 1 can lower: one container, and several that know each other by name.
const (
	RuntimeLaunchableOCI = "launchable_oci"
	RuntimeDockerCompose = "docker_compose"
)

// Manifest is one parsed and valid document. Only Parse makes a useful one.
type Manifest struct {
	// Schema is SchemaV1: which keys the document may use.
	Schema  string  `json:"schema"`
	App     App     `json:"app"`
	Version Version `json:"version"`

	features []string
}

// App is the layer that stays the same over the versions.
type App struct {
	Slug           string         `json:"slug"`
	DisplayName    string         `json:"display_name"`
	Description    string         `json:"description,omitempty"`
	Category       string         `json:"category,omitempty"`
	RuntimeBackend string         `json:"runtime_backend"`
	SupportedModes SupportedModes `json:"supported_modes,omitzero"`
}

// Operating modes: who operates an app instance.
const (
	TenantDedicated = "tenant_dedicated"
	PlatformManaged = "platform_managed"
)

// SupportedModes lists how the app may be operated; Parse fills an absent list with the narrowest mode.
type SupportedModes struct {
	OperatingModes     []string `json:"operating_modes,omitempty"`
	ControlPlaneScopes []string `json:"control_plane_scopes,omitempty"`
}

// Version is the layer of one release.
type Version struct {
	Version        string         `json:"version"`
	RuntimeBackend string         `json:"runtime_backend,omitempty"`
	Notes          string         `json:"notes,omitempty"`
	Compatibility  Compatibility  `json:"compatibility,omitzero"`
	RuntimeProfile RuntimeProfile `json:"runtime_profile"`
	// Parameters is a JSON Schema of type object: what a tenant may choose per instance.
	Parameters map[string]any `json:"parameters,omitempty"`
	// ConfigSchema is a JSON Schema for an instance's config; without one the config must be empty. With one, each
	// container finds the config as JSON in the file that GPUAAS_CONFIG_FILE names.
	ConfigSchema map[string]any `json:"config_schema,omitempty"`
	Config       Config         `json:"config,omitzero"`
	// Secrets says what a change of a secret parameter does to the containers.
	Secrets Config `json:"secrets,omitzero"`
	// InstanceIdentity is InstanceServiceAccount where each instance gets a service account of its own; else empty.
	InstanceIdentity string   `json:"instance_identity,omitempty"`
	Upgrade          Upgrade  `json:"upgrade,omitzero"`
	Metering         Metering `json:"metering,omitzero"`
	UI               UI       `json:"ui,omitzero"`
	// ExternalWorkerContract is set exactly where IsExternal holds for the runtime backend.
	ExternalWorkerContract *WorkerContract `json:"external_worker_contract,omitempty"`
}

// InstanceServiceAccount is the one value of Version.InstanceIdentity: the app finds the account in the file
// service-account.json in $GPUAAS_PARAMETERS_DIR.
const InstanceServiceAccount = "service_account"

// Config says what a change of an instance's config, or of its secret parameters, does to its containers.
type Config struct {
	// OnChange is ConfigRestart, ConfigSignal or ConfigNone; empty means ConfigRestart.
	OnChange string `json:"on_change,omitempty"`
	// Signal goes to the first process of each container; ConfigSignal needs it.
	Signal string `json:"signal,omitempty"`
}

// Values of Config.OnChange. With the last two the file's content changes under the running container.
const (
	ConfigRestart = "restart"
	ConfigSignal  = "signal"
	ConfigNone    = "none"
)

// Compatibility says which capacity can run the version.
type Compatibility struct {
	RequiresCapacityShape []string `json:"requires_capacity_shape,omitempty"`
	MinGPUCount           int      `json:"min_gpu_count,omitempty"`
	RequiresExclusiveNode bool     `json:"requires_exclusive_node,omitempty"`
	SupportedAccelerators []string `json:"supported_accelerators,omitempty"`
}

// RuntimeProfile describes the containers of an app: the one of launchable_oci, which it embeds, or the services of
// docker_compose.
type RuntimeProfile struct {
	Kind string `json:"kind"`
	ServiceProfile

	// ReadinessTimeoutSeconds bounds the time from start to ready.
	ReadinessTimeoutSeconds uint32 `json:"readiness_timeout_seconds,omitempty"`
	// Main names the service that gets the chosen resources and the accelerators; the others have their defaults.
	Main string `json:"main,omitempty"`
	// Environment lets a tenant add Python packages to the main service.
	Environment *Environment `json:"environment,omitempty"`
	Services    []Service    `json:"services,omitempty"`
}

// EnvVar is a fixed value, or the value of a parameter; one of the two is set. A parameter without a value leaves it
// out.
type EnvVar struct {
	Name      string  `json:"name"`
	Value     *string `json:"value,omitempty"`
	Parameter string  `json:"parameter,omitempty"`
}

// Port is one that the app listens on.
type Port struct {
	Name      string `json:"name"`
	Container uint32 `json:"container"`
	// Protocol is http or tcp; Parse fills http.
	Protocol string `json:"protocol,omitempty"`
	// Expose is private (the node's 127.0.0.1 only); Parse fills it.
	Expose string `json:"expose,omitempty"`
}

// Resources are the bounds within which an instance may choose.
type Resources struct {
	CPUMillis Range  `json:"cpu_millis"`
	MemoryMiB Range  `json:"memory_mib"`
	PidsMax   uint32 `json:"pids_max,omitempty"`
	// DiskMiB bounds what a container writes to its own file system; zero leaves it to the node.
	DiskMiB Quantity `json:"disk_mib,omitzero"`
	// ShmMiB is the size of /dev/shm; zero leaves it to the node.
	ShmMiB Range `json:"shm_mib,omitzero"`
	// Accelerators is how many an instance has that uses any; zero: Compatibility.MinGPUCount or more.
	Accelerators Range `json:"accelerators,omitzero"`
	// AcceleratorSharing is how an instance may share its accelerator with others of its org, protocol.SharingMPS or
	// protocol.SharingTimeSlices; empty: not at all.
	AcceleratorSharing []string `json:"accelerator_sharing,omitempty"`
}

// Range is min ≤ default ≤ max.
type Range struct {
	Min     uint64 `json:"min"`
	Default uint64 `json:"default"`
	Max     uint64 `json:"max"`
}

// Probe decides whether a service is ready, or alive. The zero value is none.
type Probe struct {
	Kind         string   `json:"kind"`
	Port         string   `json:"port,omitempty"`
	Path         string   `json:"path,omitempty"`
	Command      []string `json:"command,omitempty"`
	PeriodMillis uint32   `json:"period_millis,omitempty"`
	// TimeoutMillis bounds one try; of a command from its start, which has 10 s of its own.
	TimeoutMillis uint32 `json:"timeout_millis,omitempty"`
	// FailureThreshold is how many failures in a row count as one; 0 leaves it to the node.
	FailureThreshold uint32 `json:"failure_threshold,omitempty"`
	// StartPeriodMillis is the time after the start in which failures do not count.
	StartPeriodMillis uint32 `json:"start_period_millis,omitempty"`
}

// Scratch is a tmpfs directory that lives as long as the container.
type Scratch struct {
	Path    string `json:"path"`
	SizeMiB uint64 `json:"size_mib"`
}

// Metering says what the platform counts for the app beside the allocation.
type Metering struct {
	Kind string `json:"kind"`
}

// UI says how the app's own interface is shown.
type UI struct {
	ExtensionKind string `json:"extension_kind"`
	Port          string `json:"port,omitempty"`
	Path          string `json:"path,omitempty"`
}
