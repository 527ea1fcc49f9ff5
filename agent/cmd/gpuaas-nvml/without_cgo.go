//go:build !cgo

package main

import (
	"errors"

	"github.com/gpuaas/gpuaas/protocol"
)

func accelerators() ([]*protocol.Accelerator, error) {
	return nil, errors.New("gpuaas-nvml was built without cgo: it cannot load NVIDIA's library")
}
