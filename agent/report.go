package agent

import (
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// Report is what one pass of the reconciler found; the hub and the owner of the machine read it.
type Report struct {
	// Passes counts complete passes; the other fields mean nothing before the first.
	Passes     uint64
	Epoch      uint64
	Generation uint64
	Workloads  []*protocol.WorkloadStatus
	Conditions []string
	// Accelerators are those of the machine, which may have changed since the pass.
	Accelerators []*protocol.Accelerator
	// Environments are those that the node keeps.
	Environments []*protocol.InstalledEnvironment
	// Volumes are where the volumes of projects are that the state names.
	Volumes []*protocol.VolumeStatus
}

// SessionStatus is the state of the session to the hub, for the owner of the machine.
type SessionStatus struct {
	Connected   bool      `json:"connected"`
	HubAddr     string    `json:"hub_addr"`
	Since       time.Time `json:"since,omitzero"`
	LastError   string    `json:"last_error,omitempty"`
	LastRefusal string    `json:"last_refusal,omitempty"`
	// Quarantined is the hub's reason to send this node nothing new and to ignore its reports.
	Quarantined string `json:"quarantined,omitempty"`
}
