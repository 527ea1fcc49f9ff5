//go:build !cgo

package main

import (
	"errors"

	"github.com/gpuaas/gpuaas/protocol"
)

var errWithoutCgo = errors.New("gpuaas-nvml was built without cgo: it cannot load NVIDIA's library")

func accelerators(string) ([]*protocol.Accelerator, error) { return nil, errWithoutCgo }

func runMPS(_, _, _, _, _ string) error { return errWithoutCgo }

func endMPS(_, _ string) error { return errWithoutCgo }

func cdiSpec(string, []string) (*struct{}, error) { return nil, errWithoutCgo }
