package starter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"go.yaml.in/yaml/v3"
)

// maxMachinesBytes bounds a file of machines.
const maxMachinesBytes = 1 << 20

// FromFile gives the machines that a YAML file lists by the ids of their allocations:
//
//	0192f0c0-0000-7000-8000-000000000001:
//	  address: 10.0.0.5
//	  shell: [ssh, root@10.0.0.5]
//	  cpus: 16
//
// It reads the file for each machine anew, so that a machine may be added while a controller runs. A file that cannot
// be read now is an error at once.
func FromFile(path string) (Machines, error) {
	if _, err := readMachines(path); err != nil {
		return nil, err
	}
	return func(allocationID string) (Machine, error) {
		all, err := readMachines(path)
		if err != nil {
			return Machine{}, err
		}
		m, known := all[allocationID]
		if !known {
			return Machine{}, fmt.Errorf("%s has no machine for the allocation %s", path, allocationID)
		}
		return m, nil
	}, nil
}

func readMachines(path string) (map[string]Machine, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the machines: %w", err)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, maxMachinesBytes+1))
	if err == nil && len(text) > maxMachinesBytes {
		err = fmt.Errorf("it is larger than %d bytes", maxMachinesBytes)
	}
	if err != nil {
		return nil, fmt.Errorf("read the machines of %s: %w", path, err)
	}
	all := map[string]Machine{}
	strict := yaml.NewDecoder(bytes.NewReader(text))
	strict.KnownFields(true)
	if err := strict.Decode(&all); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read the machines of %s: %w", path, err)
	}
	for id, m := range all {
		if m.Address == "" || len(m.Shell) == 0 || m.CPUs < 1 {
			return nil, fmt.Errorf("%s: the machine of the allocation %s needs address, shell and cpus", path, id)
		}
	}
	return all, nil
}
