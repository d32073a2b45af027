"""Make four sites of the current folder from HAM10000 in ``ham/``, whose pictures are DICOM files."""

import csv
import json
from pathlib import Path

import numpy as np
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

CLASSES = ["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"]
rows, sites = list(csv.DictReader(Path("ham/train_test_split").read_text().splitlines())), {}
for site, center in {"site-1": "1", "site-2": "2", "site-3": "3", "site-4": "5"}.items():
    root = Path(site).absolute()
    (root / "dicom").mkdir(parents=True)
    lines = ["image,file,diagnosis,fold"]
    for row in rows:
        picture = Path("ham/ISIC_2019_Training_Input_preprocessed", f"{row['image']}.jpg")
        if row["center"] == center and picture.is_file():
            stored = Dataset()
            stored.file_meta = FileMetaDataset()
            stored.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
            stored.SOPClassUID, stored.SOPInstanceUID = SecondaryCaptureImageStorage, generate_uid()
            stored.Modality = "XC"
            stored.set_pixel_data(np.asarray(Image.open(picture).convert("RGB")), "RGB", 8)
            file = f"dicom/{row['image']}.dcm"
            stored.save_as(root / file, enforce_file_format=True)
            lines.append(f"{row['image']},{file},{CLASSES[int(row['target'])]},{row['fold']}")
    (root / "manifest.csv").write_text("\n".join(lines) + "\n")
    sites[site] = {"data": {"images": {"root": str(root), "file": str(root / "manifest.csv")}}}
Path("sites.json").write_text(json.dumps({"sites": sites}))
