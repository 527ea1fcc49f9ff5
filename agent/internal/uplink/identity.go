package uplink

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// The files of a node's identity, all 0600, below the data directory.
const (
	keyFile         = "node.key"      // Ed25519 private key, PKCS #8 PEM; made here, never leaves
	certificateFile = "node.crt"      // the short-lived certificate and its chain, PEM
	identityFile    = "identity.json" // what the hub said at enrollment
)

const (
	pemPrivateKey  = "PRIVATE KEY"
	pemCertificate = "CERTIFICATE"
	pemRequest     = "CERTIFICATE REQUEST"
)

// Identity is the hub's answer at enrollment, with the pin that the operator gave.
type Identity struct {
	NodeID          string `json:"node_id"`
	HubID           string `json:"hub_id"`
	APIURL          string `json:"api_url"`
	SessionAddr     string `json:"session_addr"`
	RegistryHost    string `json:"registry_host"`
	RootFingerprint string `json:"root_fingerprint"`
}

// Credentials are the node's key, certificate and identity on disk. The key is made at the first call and stays for
// ever; the certificate is renewed.
type Credentials struct {
	dir string
	key ed25519.PrivateKey

	mu       sync.Mutex
	identity Identity
	cert     *tls.Certificate
}

// OpenCredentials reads the credentials in dir, and makes the key if there is none.
func OpenCredentials(dir string) (*Credentials, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, unusable(dir, err)
	}
	c := &Credentials{dir: dir}
	var err error
	if c.key, err = readOrMakeKey(filepath.Join(dir, keyFile)); err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(filepath.Join(dir, identityFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return c, nil
	case err != nil:
		return nil, unusable(dir, err)
	}
	if err := json.Unmarshal(raw, &c.identity); err != nil {
		return nil, unusable(dir, fmt.Errorf("%s: %w", identityFile, err))
	}
	chain, err := os.ReadFile(filepath.Join(dir, certificateFile))
	if err != nil {
		return nil, unusable(dir, err)
	}
	c.cert, err = c.parse(chain)
	if err != nil {
		return nil, unusable(dir, fmt.Errorf("%s: %w", certificateFile, err))
	}
	return c, nil
}

func unusable(dir string, err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fault.New(fault.Unavailable, fault.CodeDiskFull, fmt.Sprintf("The disk of %s is full: free some space "+
			"there, or give the agent another directory with --data-dir.", dir), err)
	}
	return fault.New(fault.Unavailable, codeIdentityUnusable, fmt.Sprintf("The node's identity in %s cannot be used: %v.",
		dir, err), err)
}

func readOrMakeKey(path string) (ed25519.PrivateKey, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeKey(path)
	}
	if err != nil {
		return nil, unusable(filepath.Dir(path), err)
	}
	block, _ := pem.Decode(raw)
	if block == nil || block.Type != pemPrivateKey {
		return nil, unusable(filepath.Dir(path), errors.New(keyFile+" is not a PEM private key"))
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, unusable(filepath.Dir(path), err)
	}
	key, is := parsed.(ed25519.PrivateKey)
	if !is {
		return nil, unusable(filepath.Dir(path), errors.New(keyFile+" is not an Ed25519 key"))
	}
	return key, nil
}

func makeKey(path string) (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writeFile(path, pem.EncodeToMemory(&pem.Block{Type: pemPrivateKey, Bytes: der}))
}

// writeFile replaces a file of the identity.
func writeFile(path string, data []byte) error {
	if err := durable.Replace(path, data, 0o600); err != nil {
		return unusable(filepath.Dir(path), err)
	}
	return nil
}

// Enrolled reports whether this node has an identity and a certificate of a hub.
func (c *Credentials) Enrolled() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.identity.NodeID != "" && c.cert != nil
}

// Identity returns the identity; the zero value before enrollment.
func (c *Credentials) Identity() Identity {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.identity
}

// Node is the node's identity in signed documents.
func (c *Credentials) Node() protocol.NodeIdentity {
	return protocol.NewNodeIdentity(c.Identity().NodeID, c.public())
}

// Signer signs with the node's key.
func (c *Credentials) Signer() protocol.Signer { return protocol.NewEd25519Signer(c.key) }

// StoreKey authenticates the node's own records; it derives from the node's key.
func (c *Credentials) StoreKey() []byte {
	h := hmac.New(sha256.New, c.key.Seed())
	h.Write([]byte("gpuaas agent store v1"))
	return h.Sum(nil)
}

// SealingKey opens secret parameters; it derives from the node's key.
func (c *Credentials) SealingKey() (protocol.SealingKeyPair, error) {
	h := hmac.New(sha256.New, c.key.Seed())
	h.Write([]byte("gpuaas parameter sealing v1"))
	return protocol.DeriveSealingKey(c.Identity().NodeID, h.Sum(nil))
}

func (c *Credentials) public() ed25519.PublicKey {
	pub, _ := c.key.Public().(ed25519.PublicKey)
	return pub
}

// Certificate is the current certificate with its key.
func (c *Credentials) Certificate() (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cert == nil {
		return nil, errors.New("this node has no certificate yet")
	}
	return c.cert, nil
}

// request is a PKCS #10 request by the node's key.
func (c *Credentials) request(hostname string) (string, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: hostname}}, c.key)
	if err != nil {
		return "", err
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: pemRequest, Bytes: der})), nil
}

// save stores certificate and identity and uses them from then on. A renewal counts also where it cannot be stored, on
// a disk that is full, damaged or read-only: without it the node would lose its session. unsaved says why; the next
// start of the agent then finds the certificate of before, and renews it.
func (c *Credentials) save(id Identity, chain []byte) (unsaved, err error) {
	cert, err := c.parse(chain)
	if err != nil {
		return nil, fault.New(fault.Internal, codeCertificateInvalid, "The hub answered with a certificate that this "+
			"node cannot use.", err)
	}
	if unsaved = c.write(id, chain); unsaved != nil && !c.Enrolled() {
		return nil, unsaved
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.identity, c.cert = id, cert
	return unsaved, nil
}

// write stores the certificate, then the identity: an identity without a certificate cannot be opened.
func (c *Credentials) write(id Identity, chain []byte) error {
	raw, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	if err := writeFile(filepath.Join(c.dir, certificateFile), chain); err != nil {
		return err
	}
	failpoint.Hit("agent/enroll/certificate_written")
	return writeFile(filepath.Join(c.dir, identityFile), append(raw, '\n'))
}

func (c *Credentials) parse(chain []byte) (*tls.Certificate, error) {
	cert := &tls.Certificate{PrivateKey: c.key}
	for block, rest := pem.Decode(chain); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == pemCertificate {
			cert.Certificate = append(cert.Certificate, block.Bytes)
		}
	}
	if len(cert.Certificate) == 0 {
		return nil, errors.New("there is no certificate")
	}
	leaf, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		return nil, err
	}
	pub, is := leaf.PublicKey.(ed25519.PublicKey)
	if !is || !bytes.Equal(pub, c.public()) {
		return nil, errors.New("the certificate is for another key")
	}
	cert.Leaf = leaf
	return cert, nil
}
