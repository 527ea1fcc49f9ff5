package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxDestinations bounds egress.allow.
const maxDestinations = 200

// EgressMode says which networks beyond the machine members reach.
type EgressMode string

// The modes of egress.
const (
	// EgressInternet is the default: public addresses, and not those of networks that the machine is connected to.
	EgressInternet EgressMode = "internet"
	// EgressNone is nothing but what Egress.Allow names.
	EgressNone EgressMode = "none"
	// EgressAll is whatever the machine reaches, except the metadata addresses of clouds.
	EgressAll EgressMode = "all"
)

// Egress is what members may reach outside the machine. The zero value is the internet.
type Egress struct {
	Mode EgressMode
	// Allow is reached in every mode.
	Allow []Destination
}

// Destination is an IPv4 network that members may reach.
type Destination struct {
	Prefix netip.Prefix
	// FirstPort and LastPort bound the TCP and UDP ports; 0 is all, and then ICMP is allowed, too.
	FirstPort, LastPort uint16
}

// UnmarshalYAML reads either the mode alone, or a mapping with mode and allow.
func (e *Egress) UnmarshalYAML(node *yaml.Node) error {
	if node.Kind == yaml.ScalarNode {
		return e.setMode(node.Value)
	}
	if node.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: egress must be none, internet or all, or have the keys mode and allow", node.Line)
	}
	// A decoder's refusal of unknown keys does not reach in here.
	for i := 0; i+1 < len(node.Content); i += 2 {
		if key := node.Content[i].Value; key != "mode" && key != "allow" {
			return fmt.Errorf("line %d: field %s not found in egress", node.Content[i].Line, key)
		}
	}
	var doc struct {
		Mode  string   `yaml:"mode"`
		Allow []string `yaml:"allow"`
	}
	if err := node.Decode(&doc); err != nil {
		return err
	}
	if len(doc.Allow) > maxDestinations {
		return fmt.Errorf("egress.allow must list at most %d destinations", maxDestinations)
	}
	for _, text := range doc.Allow {
		d, err := parseDestination(text)
		if err != nil {
			return err
		}
		e.Allow = append(e.Allow, d)
	}
	if doc.Mode == "" {
		return nil
	}
	return e.setMode(doc.Mode)
}

func (e *Egress) setMode(text string) error {
	if !slices.Contains([]EgressMode{EgressInternet, EgressNone, EgressAll}, EgressMode(text)) {
		return fmt.Errorf("egress must be none, internet or all, not %q", text)
	}
	e.Mode = EgressMode(text)
	return nil
}

// parseDestination reads "10.1.2.3", "10.1.0.0/16", "10.1.2.3:443" or "10.1.0.0/16:8000-8010".
func parseDestination(text string) (Destination, error) {
	bad := fmt.Errorf("egress.allow has %q, which is no IPv4 address or network like 10.1.0.0/16, 10.1.2.3:443 or "+
		"10.1.0.0/16:8000-8010", text)
	network, ports, hasPorts := strings.Cut(text, ":")
	if !strings.Contains(network, "/") {
		network += "/32"
	}
	prefix, err := netip.ParsePrefix(network)
	if err != nil || !prefix.Addr().Is4() || prefix.Masked() != prefix {
		return Destination{}, bad
	}
	if prefix.Bits() >= 8 && prefix.Addr().IsLoopback() {
		return Destination{}, fmt.Errorf("egress.allow has %q, which is the machine itself: members never reach that", text)
	}
	d := Destination{Prefix: prefix}
	if !hasPorts {
		return d, nil
	}
	var ok bool
	if d.FirstPort, d.LastPort, ok = parsePorts(ports); !ok {
		return Destination{}, bad
	}
	return d, nil
}

// parsePorts reads "8000" or "8000-8010".
func parsePorts(text string) (first, last uint16, ok bool) {
	from, to, isRange := strings.Cut(text, "-")
	if !isRange {
		to = from
	}
	a, errA := strconv.ParseUint(from, 10, 16)
	b, errB := strconv.ParseUint(to, 10, 16)
	return uint16(a), uint16(b), errA == nil && errB == nil && a > 0 && a <= b
}
