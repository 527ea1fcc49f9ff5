package protocol

// Vendors of accelerators.
const (
	VendorNVIDIA = "nvidia"
	VendorAMD    = "amd"
)

// Health of an accelerator. Only one that is ok may be given to a new allocation.
const (
	HealthOK = "ok"
	// HealthDegraded: it works; its memory has had errors that could not be corrected, or parts of it wait to be replaced.
	HealthDegraded = "degraded"
	// HealthFaulty: it does not work.
	HealthFaulty = "faulty"
	// HealthMissing: the node does not name it any more. Decided by the hub only.
	HealthMissing = "missing"
)

// Kinds of links between accelerators.
const (
	LinkNVLink   = "nvlink"
	LinkNVSwitch = "nvswitch"
	LinkXGMI     = "xgmi"
)
